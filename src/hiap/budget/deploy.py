"""How a network will run: runtime, precision, batch and mode. Nothing here needs torch, so that options can name it."""

from __future__ import annotations

from dataclasses import dataclass

from hiap.errors import InputError

__all__ = ["MODES", "PRECISIONS", "RUNTIMES", "Deployment"]

RUNTIMES = ("torch", "onnx", "openvino")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
MODES = {
    "eager": "as it is",
    "graph": "its kernels in a CUDA graph",
    "compile": "optimised and compiled, in a CUDA graph; on fused kernels where they run",
}


@dataclass(frozen=True)
class Deployment:
    """How a network will run."""

    precision: str
    batch: int
    mode: str
    runtime: str = "torch"

    @classmethod
    def parse(cls, text: str | None, cuda: bool) -> Deployment:
        """From words in any order, such as "bf16,256,compile"; what is not said is the default of the device.

        Raises:
            InputError: with the words that are known.
        """
        words = (text or "").replace(" ", "").split(",") if text else []
        cuda = cuda and not {*words} & {*RUNTIMES[1:]}  # which are measured on the CPU
        found = {"precision": "bf16" if cuda else "fp32", "batch": 256 if cuda else 1}
        found |= {"mode": "compile" if cuda else "eager", "runtime": "torch"}
        kinds = {**dict.fromkeys(RUNTIMES, "runtime"), **dict.fromkeys(PRECISIONS, "precision")}
        kinds |= dict.fromkeys(MODES, "mode")
        seen: dict[str, str] = {}
        for word in words:
            kind = "batch" if word.isascii() and word.isdigit() and int(word) > 0 else kinds.get(word)
            if kind is None:
                raise InputError(
                    f"deploy {text!r}: {word!r} is not a runtime ({', '.join(RUNTIMES)}), precision "
                    f"({', '.join(PRECISIONS)}), mode ({', '.join(MODES)}) or batch size; write it as bf16,256,compile"
                )
            if kind in seen:
                raise InputError(f"deploy {text!r} names two of one kind: {seen[kind]} and {word}")
            seen[kind] = word
            found[kind] = int(word) if kind == "batch" else word
        if found["runtime"] != "torch" and found["mode"] != "eager":
            raise InputError(f"deploy {text!r}: {found['mode']} is a mode of torch; leave it out")
        return cls(str(found["precision"]), int(found["batch"]), str(found["mode"]), str(found["runtime"]))
