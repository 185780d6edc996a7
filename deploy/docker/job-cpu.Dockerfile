# The demo job on a CPU: vLLM, Megatron-core and Ray in one process tree, for compose.yaml.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
# The compilers stay: vLLM and torch.compile call one at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/rl-kernel
COPY pyproject.toml CMakeLists.txt README.md ./
COPY rl_kernel rl_kernel
COPY services services
COPY auditor auditor
# The versions are pinned in pyproject.toml.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[cpu,auditor]" \
    && pip uninstall -y torchvision torchaudio torchcodec
# A named volume takes the owner of the folder that it is first mounted on.
RUN useradd --uid 65532 --create-home --shell /bin/bash rl \
    && install -d -o 65532 -g 65532 /runs /models /weights /tmp/ray
USER 65532:65532
WORKDIR /home/rl
ENV VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m", "services.main"]
CMD ["--help"]
