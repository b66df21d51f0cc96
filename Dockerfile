# The main job, and the tests of the very environment that it runs in. The README's section "Containers" has the commands.
#
# Built on the first image, run on the second, which needs neither compiler nor CUDA libraries: torch's wheels bring
# those. Both have to be of one distribution, for its Python. Another CUDA release has to be the one that torch's wheels
# were built with, or DeepSpeed refuses to compile.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG RUNTIME_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${BASE_IMAGE} AS dependencies
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
WORKDIR /opt/distaccum
COPY requirements.lock requirements-dev.lock ./
# An index besides pip's own: that of torch's CPU wheels, for an image without CUDA. A pip configuration with secrets in
# it (a private index) is the secret "pip", which no layer keeps.
ARG TORCH_INDEX=""
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    grep -hv -e "^deepspeed==" -e "^-c " requirements.lock requirements-dev.lock > /tmp/first.txt \
    && pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r /tmp/first.txt \
    && rm /tmp/first.txt
# DeepSpeed comes as source, and asks the installed torch what to compile. Where there is nvcc, these kernels are compiled
# now; they must not depend on the building machine, which rules out those for the CPU (-march=native). All others it
# compiles at their first use, which takes an image with a compiler.
ARG DEEPSPEED_OPS="FUSED_ADAM FUSED_LAMB FUSED_LION"
ARG CUDA_ARCHITECTURES="8.0;8.6;8.9;9.0;10.0;12.0+PTX"
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    if command -v nvcc > /dev/null; then \
        export DS_ACCELERATOR=cuda TORCH_CUDA_ARCH_LIST="$CUDA_ARCHITECTURES"; \
        for op in $DEEPSPEED_OPS; do export "DS_BUILD_$op=1"; done; \
    else \
        export DS_ACCELERATOR=cpu DEEPSPEED_OPS=""; \
    fi \
    && pip install --use-pep517 --no-build-isolation --no-deps "$(grep "^deepspeed==" requirements-dev.lock)" \
    && python -c "from deepspeed.git_version_info_installed import installed_ops as built; \
assert all(built[op.lower()] for op in '$DEEPSPEED_OPS'.split()), built"
# The package itself is a link to this folder, so that its code may change without a new environment.
COPY pyproject.toml ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    mkdir distaccum conf && touch distaccum/__init__.py README.md LICENSE \
    && pip install --no-deps --editable .

FROM ${RUNTIME_IMAGE} AS runtime
# tini is process 1: it hands signals on to the job and reaps what dies, under Kubernetes too, where there is no --init.
# The tests need ps.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates procps python3 tini \
    && rm -rf /var/lib/apt/lists/*
# Any uid may write here, and a volume that is mounted here first gets these rights: docker run --user works as well.
RUN groupadd --gid 10001 distaccum \
    && useradd --uid 10001 --gid 10001 --home-dir /workspace --no-create-home --shell /usr/sbin/nologin distaccum \
    && mkdir -p /workspace/runs \
    && chmod 1777 /workspace /workspace/runs
COPY --from=dependencies /opt/venv /opt/venv
WORKDIR /opt/distaccum
COPY . .

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="distaccum" \
    org.opencontainers.image.description="Distributed training that computes exactly the stated global batch's gradient" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/workspace \
    LOGNAME=distaccum \
    PYTHONUNBUFFERED=1 \
    PYTEST_ADDOPTS="-p no:cacheprovider" \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /workspace
# None: a batch job ends, and its exit code and status.json say how. An age of status.json that means trouble depends on
# the job (a first window compiles, an evaluation may take an hour); a rank that hangs is the collectives' timeout's to end.
HEALTHCHECK NONE
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "/opt/distaccum/launch/container.sh"]
