# Generates on ONNX Runtime's CPU provider. No torch.
# From the repository's root: docker build --file docker/cpu.Dockerfile --tag slipstream:0.1.0-cpu .
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
RUN python -m venv --without-pip /opt/slipstream \
    && pip --python /opt/slipstream install --no-cache-dir --constraint constraints.txt /wheels/*.whl \
    && pip --python /opt/slipstream check \
    && /opt/slipstream/bin/slipstream --version

FROM python:3.12.14-slim-trixie
RUN groupadd --gid 10001 slipstream \
    && useradd --uid 10001 --gid 10001 --no-create-home --no-log-init slipstream \
    && install --directory --owner=10001 --group=10001 /bundles
COPY --from=builder /opt/slipstream /opt/slipstream
# HOME is writable for any --user, also with a read-only root and a tmpfs at /tmp.
ENV PATH=/opt/slipstream/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /bundles
# As process 1, Python ignores SIGTERM; SIGINT stops a generation or a build cleanly.
STOPSIGNAL SIGINT
HEALTHCHECK --interval=5m --timeout=30s --start-period=30s --retries=3 CMD ["slipstream", "doctor", "--engine", "onnxruntime"]
ENTRYPOINT ["slipstream"]
CMD ["--help"]
