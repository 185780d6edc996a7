{{- define "rlk.job" -}}
{{ include "rlk.name" . }}-job
{{- end }}

{{- /* The Secret and the key of the token that the job carries: its own, or the one that opens every run. Empty: none. */ -}}
{{- define "rlk.jobToken" -}}
{{- if .Values.job.token.existingSecret -}}
{{ dict "secret" .Values.job.token.existingSecret "key" .Values.job.token.key | toJson }}
{{- else if and .Values.auditor.enabled .Values.auditor.token.existingSecret -}}
{{ dict "secret" .Values.auditor.token.existingSecret "key" .Values.auditor.token.key | toJson }}
{{- else -}}
{}
{{- end }}
{{- end }}

{{- /* Head and workers are different pods: what one writes for the other must lie in a claim that both mount. */ -}}
{{- define "rlk.jobFolders" -}}
{{- $job := .Values.job }}
{{- $weights := dig "weights" "directory" "" $job.config }}
{{- if not (or .Values.weights.existingClaim $job.runsClaim) }}
{{- fail "the job's pods share no folder: name a ReadWriteMany claim in weights.existingClaim, from which the workers read what the head publishes (or one in job.runsClaim)" }}
{{- end }}
{{- if and $weights (not (and .Values.weights.existingClaim (hasPrefix "/weights/" (printf "%s/" $weights)))) (not (and $job.runsClaim (hasPrefix "/runs/" (printf "%s/" $weights)))) }}
{{- fail (printf "job.config.weights.directory is %s, which the job's pods do not share: it must be below /weights (weights.existingClaim) or /runs (job.runsClaim)" $weights) }}
{{- end }}
{{- if and (not $job.runsClaim) (gt (int (dig "run" "checkpoint_every" 0 $job.config)) 0) }}
{{- fail "job.config.run.checkpoint_every: the workers write checkpoints into the run's folder, which the head makes: name a ReadWriteMany claim in job.runsClaim" }}
{{- end }}
{{- if and (not $job.runsClaim) (gt (int (dig "trainer" "tp_size" 1 $job.config)) 1) }}
{{- fail "job.config.trainer.tp_size: the trainer's ranks meet in the run's folder, which the head makes: name a ReadWriteMany claim in job.runsClaim" }}
{{- end }}
{{- end }}

{{- /* The job's config with what the chart knows of the auditor and the weights. */ -}}
{{- define "rlk.jobConfig" -}}
{{- $own := dict }}
{{- include "rlk.jobFolders" . }}
{{- if .Values.auditor.enabled }}
{{- if and .Values.auditor.tls.existingSecret (not .Values.job.tls.existingSecret) }}
{{- fail "the auditor has certificates (auditor.tls): name a Secret with its authority in job.tls.existingSecret" }}
{{- end }}
{{- if and .Values.auditor.tls.clientCertificates (not .Values.job.tls.clientCertificate) }}
{{- fail "the auditor demands certificates (auditor.tls.clientCertificates): set job.tls.clientCertificate" }}
{{- end }}
{{- $host := printf "%s.%s.svc" (include "rlk.auditor" .) .Release.Namespace }}
{{- $auditor := dict "grpc" (printf "%s:%v" $host .Values.auditor.service.grpcPort) "http" (printf "%s://%s:%v" (.Values.auditor.tls.existingSecret | empty | ternary "http" "https") $host .Values.auditor.service.httpPort) }}
{{- $_ := set $own "auditor" $auditor }}
{{- end }}
{{- with include "rlk.jobToken" . | fromJson }}
{{- $_ := set $own "auditor" (merge ($own.auditor | default dict) (dict "token_file" (printf "/run/secrets/auditor/%s" .key))) }}
{{- end }}
{{- if .Values.job.tls.existingSecret }}
{{- $tls := dict "tls_ca" "/run/secrets/auditor-tls/ca.crt" }}
{{- if .Values.job.tls.clientCertificate }}
{{- $_ := set $tls "tls_certificate" "/run/secrets/auditor-tls/tls.crt" }}
{{- $_ := set $tls "tls_key" "/run/secrets/auditor-tls/tls.key" }}
{{- end }}
{{- $_ := set $own "auditor" (merge ($own.auditor | default dict) $tls) }}
{{- end }}
{{- if .Values.weights.existingClaim }}
{{- /* Jobs share the claim: each run has a folder of its own there, directly below the root that the auditor searches. */ -}}
{{- $_ := set $own "weights" (dict "directory" "/weights") }}
{{- end }}
{{- $_ := set $own "run" (dict "directory" "/runs") }}
{{- mergeOverwrite $own (deepCopy .Values.job.config) | toYaml }}
{{- end }}

{{- /* A pod of the Ray cluster. Takes root, part (head or workers), and gpus. */ -}}
{{- define "rlk.rayPod" -}}
{{- $job := .root.Values.job }}
{{- $gpu := get (dict "cuda" "nvidia.com/gpu" "rocm" "amd.com/gpu") $job.accelerator }}
{{- $resources := deepCopy .part.resources }}
{{- if .gpus }}
{{- $_ := set $resources "limits" (mergeOverwrite (dict $gpu (.gpus | toString)) ($resources.limits | default dict)) }}
{{- $_ := set $resources "requests" (mergeOverwrite (dict $gpu (.gpus | toString)) ($resources.requests | default dict)) }}
{{- end }}
metadata:
  labels:
    {{- include "rlk.labels" .root | nindent 4 }}
    app.kubernetes.io/component: ray
    {{ .root.Values.auditor.networkPolicy.reporterLabel }}: "true"
spec:
  automountServiceAccountToken: false
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    seccompProfile:
      type: RuntimeDefault
  containers:
    - name: ray
      image: {{ include "rlk.image" (dict "image" $job.image "appVersion" .root.Chart.AppVersion) | quote }}
      imagePullPolicy: {{ $job.image.pullPolicy }}
      env:
        - name: OMP_NUM_THREADS
          value: "1"
        - name: HF_HUB_OFFLINE
          value: "1"
        - name: VLLM_NO_USAGE_STATS
          value: "1"
        {{- if eq .name "head" }}
        {{- with $job.grafanaHost }}
        - name: RAY_GRAFANA_HOST
          value: {{ . | quote }}
        {{- end }}
        {{- with $job.grafanaIframeHost }}
        - name: RAY_GRAFANA_IFRAME_HOST
          value: {{ . | quote }}
        {{- end }}
        {{- with $job.prometheusHost }}
        - name: RAY_PROMETHEUS_HOST
          value: {{ . | quote }}
        - name: RAY_PROMETHEUS_NAME
          value: Prometheus
        {{- end }}
        {{- end }}
      ports:
        {{- if eq .name "head" }}
        - {name: gcs, containerPort: 6379, protocol: TCP}
        - {name: dashboard, containerPort: 8265, protocol: TCP}
        - {name: client, containerPort: 10001, protocol: TCP}
        - {name: as-metrics, containerPort: 44217, protocol: TCP}
        - {name: dash-metrics, containerPort: 44227, protocol: TCP}
        {{- end }}
        - {name: metrics, containerPort: 8080, protocol: TCP}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/rl-job, readOnly: true}
        - {name: runs, mountPath: /runs}
        - {name: shm, mountPath: /dev/shm}
        {{- if include "rlk.jobToken" .root | fromJson }}
        - {name: auditor-token, mountPath: /run/secrets/auditor, readOnly: true}
        {{- end }}
        {{- if $job.tls.existingSecret }}
        - {name: auditor-tls, mountPath: /run/secrets/auditor-tls, readOnly: true}
        {{- end }}
        {{- if .root.Values.weights.existingClaim }}
        - {name: weights, mountPath: /weights}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "rlk.job" .root }}
    - name: runs
      {{- if $job.runsClaim }}
      persistentVolumeClaim:
        claimName: {{ $job.runsClaim | quote }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $job.workers.sharedMemory | quote }}
    {{- with include "rlk.jobToken" .root | fromJson }}
    - name: auditor-token
      secret:
        secretName: {{ .secret | quote }}
        defaultMode: 0440
    {{- end }}
    {{- with $job.tls.existingSecret }}
    - name: auditor-tls
      secret:
        secretName: {{ . | quote }}
        defaultMode: 0440
    {{- end }}
    {{- with .root.Values.weights.existingClaim }}
    - name: weights
      persistentVolumeClaim:
        claimName: {{ . | quote }}
    {{- end }}
  {{- with .part.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .part.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "rlk.rayClusterSpec" -}}
rayVersion: {{ .Values.job.rayVersion | quote }}
{{- if .Values.job.tokenAuth }}
authOptions:
  mode: token
{{- end }}
headGroupSpec:
  rayStartParams:
    dashboard-host: "0.0.0.0"
    metrics-export-port: "8080"
    # The head keeps the books; the engines go where the GPUs are.
    num-gpus: "0"
  template: {{- include "rlk.rayPod" (dict "root" . "name" "head" "part" .Values.job.head "gpus" 0) | nindent 4 }}
workerGroupSpecs:
  - groupName: {{ .Values.job.accelerator }}
    replicas: {{ .Values.job.workers.replicas }}
    minReplicas: {{ .Values.job.workers.replicas }}
    maxReplicas: {{ .Values.job.workers.replicas }}
    rayStartParams:
      metrics-export-port: "8080"
    template: {{- include "rlk.rayPod" (dict "root" . "name" "worker" "part" .Values.job.workers "gpus" .Values.job.workers.gpus) | nindent 6 }}
{{- end }}
