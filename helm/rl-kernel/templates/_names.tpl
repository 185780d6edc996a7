{{- define "rlk.name" -}}
{{- printf "%s" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "rlk.auditor" -}}
{{ include "rlk.name" . }}-auditor
{{- end }}

{{- define "rlk.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "rlk.auditorSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: auditor
{{- end }}

{{- define "rlk.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .appVersion }}
{{- end }}
{{- end }}

{{- /* Prometheus, alerts and dashboards tell clusters apart by this label. */ -}}
{{- define "rlk.clusterRelabeling" -}}
- targetLabel: cluster
  replacement: {{ .Values.cluster | quote }}
{{- end }}

{{- /* Takes root and path. With client certificates the kubelet, which has none, can only see that the port is open. */ -}}
{{- define "rlk.probe" -}}
{{- $tls := .root.Values.auditor.tls }}
{{- if $tls.clientCertificates -}}
tcpSocket: {port: http}
{{- else -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ $tls.existingSecret | empty | ternary "HTTP" "HTTPS" }}}
{{- end }}
{{- end }}
