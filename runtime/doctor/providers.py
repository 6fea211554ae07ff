"""Which of ONNX Runtime's providers work: each runs a small graph, since some are listed that can't be loaded."""

from __future__ import annotations

import os

import numpy as np

from slipstream.runtime.errors import BackendError

from .findings import Finding, advice_for_packaged, guarded, one_line, package_version

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_NAMES = {_CPU: "onnxruntime cpu", _CUDA: "onnxruntime cuda"}
_SILENT, _WARNINGS = 4, 2  # ONNX Runtime's severities

# y = ReduceMin(x, axes=[1]) of int64 [1, 2], in ONNX's bytes: how the target counts accepted drafts. ONNX Runtime's
# CUDA provider loads without cuDNN and fails where a kernel needs it, so that loading alone proves little.
PROBE_MODEL = (
    b'\x08\n:\\\n%\n\x01x\n\x01a\x12\x01y"\tReduceMin*\x0f\n\x08keepdims\x18\x00\xa0\x01\x02\x12\x01g'
    b"*\n\x08\x01\x10\x07:\x01\x01B\x01aZ\x13\n\x01x\x12\x0e\n\x0c\x08\x07\x12\x08\n\x02\x08\x01\n\x02\x08\x02"
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x07\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x18"
)


def onnxruntime_findings() -> list[Finding]:
    """ONNX Runtime itself, its CPU provider and its CUDA provider."""
    providers: list[str] = []

    def package() -> Finding:
        import onnxruntime as ort

        providers.extend(ort.get_available_providers())
        others = [guarded(name, _provider, name, name) for name in providers if name not in _NAMES]
        texts = [other.name if other.state == "ok" else f"{other.name} (does not load)" for other in others]
        unused = f", has what slipstream does not use: {', '.join(texts)}" if texts else ""
        if os.environ.get("ORT_DISABLE_TELEMETRY") == "1":
            return Finding("onnxruntime", "ok", f"{ort.__version__}{unused}, telemetry off")
        advice = "ORT_DISABLE_TELEMETRY=1 turns it off"
        return Finding("onnxruntime", "ok", f"{ort.__version__}{unused}, telemetry on", advice)

    findings = [guarded("onnxruntime", package)]
    if findings[0].state != "ok":
        return findings + [Finding(name, "missing", "no ONNX Runtime") for name in _NAMES.values()]
    for provider, name in _NAMES.items():
        findings.append(guarded(name, _provider if provider in providers else _absent, provider, name))
    return findings


def _absent(provider: str, name: str) -> Finding:
    from slipstream.runtime.ort.probes import CUDA_PROVIDER_ADVICE, REINSTALL_ADVICE

    if package_version("onnxruntime") and package_version("onnxruntime-gpu"):
        detail = "hidden: onnxruntime and onnxruntime-gpu are both installed and overwrite each other"
        return Finding(name, "problem", detail, REINSTALL_ADVICE)
    advice = CUDA_PROVIDER_ADVICE if provider == _CUDA else "pip install --force-reinstall onnxruntime"
    return Finding(name, "missing", "this onnxruntime has no such provider", advice)


def _provider(provider: str, name: str) -> Finding:
    """Whether a provider works. What fails is a finding and no log line."""
    import onnxruntime as ort

    from slipstream.runtime.ort.probes import LIBRARY_ADVICE, missing_library
    from slipstream.runtime.ort.session import open_session, session_options

    options = session_options()
    options.log_severity_level = _SILENT
    ort.set_default_logger_severity(_SILENT)
    try:
        session = open_session(PROBE_MODEL, options, "a small graph", provider=provider)
        if session.get_providers()[0] == provider:
            session.run(None, {"x": np.zeros((1, 2), np.int64)})
            return Finding(name, "ok", "loads and runs")
    except Exception as error:  # noqa: BLE001 (onnxruntime has one class per status code and no common base)
        detail = one_line(f"does not run: {error.found if isinstance(error, BackendError) else error}")
        advice = "see driver, gpu and cudnn" if provider == _CUDA else "reinstall onnxruntime"
        return Finding(name, "problem", detail, advice)
    finally:
        ort.set_default_logger_severity(_WARNINGS)
    library = missing_library() if provider == _CUDA else None
    if library is not None:
        advice = advice_for_packaged(library.partition(":")[0]) or LIBRARY_ADVICE
        return Finding(name, "problem", f"does not load: {library}", advice)
    if provider == _CUDA:
        return Finding(name, "problem", "does not load, though its libraries are there", "see driver and gpu")
    return Finding(name, "problem", "does not load")
