# TensorRT: builds engines for the GPU it runs on (amd64, or arm64 servers). No torch.
# From the repository's root: docker build --file docker/datacenter.Dockerfile --tag slipstream:0.1.0-datacenter .
FROM python:3.12.14-slim-trixie AS builder
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt hatchling
COPY pyproject.toml README.md LICENSE ./
COPY slipstream slipstream
COPY export export
COPY engines engines
COPY runtime runtime
RUN python -m hatchling build --target wheel --directory /wheels
# TensorRT's wheels on the common base, not nvcr.io/nvidia/tensorrt: smaller (that one has compilers and samples), one
# Python and one base to patch for all images. NVIDIA owns these names on both indexes; the version is exact.
# onnx and onnx-ir are what `slipstream build` needs of the export extra.
RUN python -m venv --without-pip /opt/slipstream \
    && pip --python /opt/slipstream install --no-cache-dir --constraint constraints.txt \
        --extra-index-url https://pypi.nvidia.com \
        "$(echo /wheels/*.whl)[tensorrt]" tensorrt==11.4.0.106 onnx onnx-ir \
    && pip --python /opt/slipstream check \
    && /opt/slipstream/bin/slipstream --version

FROM python:3.12.14-slim-trixie
RUN groupadd --gid 10001 slipstream \
    && useradd --uid 10001 --gid 10001 --no-create-home --no-log-init slipstream \
    && install --directory --owner=10001 --group=10001 /bundles
COPY --from=builder /opt/slipstream /opt/slipstream
# HOME is writable for any --user, also with a read-only root and a tmpfs at /tmp.
ENV PATH=/opt/slipstream/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1
# The container toolkit reads these: which GPUs, and which of the driver's libraries.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /bundles
# As process 1, Python ignores SIGTERM; SIGINT stops a generation or a build cleanly.
STOPSIGNAL SIGINT
HEALTHCHECK --interval=5m --timeout=30s --start-period=30s --retries=3 CMD ["slipstream", "doctor", "--engine", "tensorrt"]
ENTRYPOINT ["slipstream"]
CMD ["--help"]
