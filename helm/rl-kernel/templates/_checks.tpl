{{- /* Combinations of values that would install and not work: each is refused in one line that says what is missing. */ -}}
{{- define "rlk.auditorChecks" -}}
{{- if and (not .Values.auditor.token.existingSecret) (not .Values.auditor.token.jobsSecret) (not .Values.auditor.token.insecure) (not .Values.auditor.tls.clientCertificates) }}
{{- fail "auditor.token.existingSecret is empty: name a Secret with the bearer token, or set auditor.token.insecure to true" }}
{{- end }}
{{- if and .Values.auditor.token.jobsSecret .Values.monitoring.serviceMonitor.enabled (not .Values.auditor.token.existingSecret) }}
{{- fail "auditor.token.jobsSecret binds every token to runs, and Prometheus reads all: name its Secret in auditor.token.existingSecret" }}
{{- end }}
{{- if and .Values.auditor.tls.clientCertificates (not .Values.auditor.tls.existingSecret) }}
{{- fail "auditor.tls.clientCertificates needs auditor.tls.existingSecret" }}
{{- end }}
{{- $monitor := .Values.monitoring.serviceMonitor }}
{{- with .Values.auditor }}
{{- if and $monitor.enabled .networkPolicy.enabled (not .networkPolicy.readerNamespaces) }}
{{- fail "monitoring.serviceMonitor: the NetworkPolicy keeps Prometheus out; select its namespace in auditor.networkPolicy.readerNamespaces" }}
{{- end }}
{{- if and $monitor.enabled .tls.existingSecret (not $monitor.tlsConfig) }}
{{- fail "monitoring.serviceMonitor.tlsConfig is empty and the auditor has certificates: give at least ca and serverName" }}
{{- end }}
{{- if and .postgres.url (not .postgres.existingSecret) }}
{{- fail "auditor.postgres.url needs its password: name the Secret in auditor.postgres.existingSecret" }}
{{- end }}
{{- if and .networkPolicy.enabled (not .networkPolicy.egress) }}
{{- $calls := list }}
{{- if .postgres.url }}{{- $calls = append $calls "auditor.postgres.url" }}{{- end }}
{{- if contains "://" (.config.archive | default "") }}{{- $calls = append $calls "auditor.config.archive" }}{{- end }}
{{- if contains "://" (.config.evidence_place | default "") }}{{- $calls = append $calls "auditor.config.evidence_place" }}{{- end }}
{{- if ne (.config.recompute_pool | default "process") "process" }}{{- $calls = append $calls "auditor.config.recompute_pool" }}{{- end }}
{{- with $calls }}
{{- fail (printf "%s: the NetworkPolicy lets nothing out; allow it, and DNS (port 53, UDP and TCP), in auditor.networkPolicy.egress" (join ", " .)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
