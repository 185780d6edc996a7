# The RL job on AMD GPUs. Not run on AMD hardware by this project: see docs/numerics.md.
#
#   docker build -f deploy/docker/job-rocm.Dockerfile --build-arg BASE_IMAGE=… -t rl-kernel-job-rocm:0.1.0 .
#
# BASE_IMAGE brings ROCm, torch, Triton and vLLM 0.32.0 and has no default, for none was tried; this adds Megatron-core,
# Ray and the project, and changes none of those.
ARG BASE_IMAGE
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
ARG RAY_VERSION=2.60.0
ARG MEGATRON_VERSION=0.19.2
USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Builds the reference here; Triton calls a compiler at run time. KubeRay's probes call wget in the container.
# hadolint ignore=DL3008
RUN { command -v c++ && command -v wget; } \
    || { apt-get update && apt-get install -y --no-install-recommends g++ wget && rm -rf /var/lib/apt/lists/*; }
WORKDIR /opt/rl-kernel
COPY pyproject.toml CMakeLists.txt README.md ./
COPY rl_kernel rl_kernel
COPY services services
COPY auditor auditor
# --no-deps for what would bring another torch. The versions of torch and vLLM before and after must be the same.
RUN pip freeze | grep -iE '^(torch|triton|vllm)[ =@]' > /tmp/before \
    && pip install --no-cache-dir "ray[default]==${RAY_VERSION}" "grpcio>=1.85.1" "protobuf>=7.35.1" "rich>=14" \
       "matplotlib>=3.10" "prometheus-client>=0.26" "fastapi>=0.136,<0.137" "uvicorn>=0.50" "ruamel.yaml>=0.19" \
    && pip install --no-cache-dir --no-deps "megatron-core==${MEGATRON_VERSION}" . \
    && pip freeze | grep -iE '^(torch|triton|vllm)[ =@]' | diff /tmp/before - \
    && rm -rf /opt/rl-kernel /tmp/before
# KubeRay needs bash and a home that the user can write.
RUN useradd --uid 65532 --create-home --shell /bin/bash rl
USER 65532:65532
WORKDIR /home/rl
ENV VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
ENTRYPOINT []
CMD ["python3", "-m", "services.main", "--help"]
