# The auditor: no torch, no vLLM, no Ray; runs as nobody on a root file system that may be read-only.
#
#   docker build -f deploy/docker/auditor.Dockerfile -t rl-kernel-auditor:0.1.0 .
#
# BASE_IMAGE: any Debian or Ubuntu image with Python >= 3.11.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
# The compiler builds one module and stays in this stage, so its version is left to the distribution.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md ./
COPY rl_kernel rl_kernel
COPY auditor auditor
COPY services/__init__.py services/
# Of pyarrow stay Parquet and the file systems; its RPC server, headers, sources and tests are a third of it. One of its
# libraries comes three times, and only the one that the others link (with one number) is opened.
RUN python3 -m venv /opt/auditor \
    && /opt/auditor/bin/pip wheel --no-cache-dir --no-deps -w /wheels . \
    && /opt/auditor/bin/pip install --no-cache-dir "$(ls /wheels/*.whl)[auditor,archive,postgres]" \
    && /opt/auditor/bin/pip uninstall -y pip setuptools \
    && /opt/auditor/bin/python -m compileall -q /opt/auditor/lib \
    && find /opt/auditor/lib \( -path '*/site-packages/services' -o -path '*/rl_kernel/ops' \
        -o -path '*/pyarrow/include' -o -path '*/pyarrow/tests' -o -path '*/pyarrow/src' \
        -o -path '*/pyarrow/*flight*' -o -path '*/pyarrow/*.py[xd]' -o -path '*/pyarrow/*.pxi' \
        -o -path '*/pyarrow/libarrow_python*.so' -o -path '*/pyarrow/libarrow_python*.so.*.*' \
        -o -path '*/numpy/*tests' -o -path '*/numpy/f2py' -o -path '*/numpy/_core/include' \) -prune -exec rm -rf {} +

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
COPY --from=build /opt/auditor /opt/auditor
# A number, so that Kubernetes can see that it is not root.
RUN mkdir -p /var/lib/auditor && chown 65532:65532 /var/lib/auditor
USER 65532:65532
WORKDIR /var/lib/auditor
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
EXPOSE 50051 9464
VOLUME /var/lib/auditor
ENTRYPOINT ["/opt/auditor/bin/python", "-m", "auditor.main"]
