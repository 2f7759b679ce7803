"""Serve an exported model over HTTP, with onnxruntime, numpy and Pillow alone: no HiAP, no PyTorch.

hiap export runs/mine -o mine.onnx
python examples/serve.py mine.onnx --port 8000
curl --data-binary @cat.png localhost:8000
"""

import argparse
import io
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

LARGEST = 20_000_000  # bytes of an image


class Classifier:
    """The model in a file. Several threads may call it at once."""

    def __init__(self, file: str) -> None:
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.about = json.loads(self.session.get_modelmeta().custom_metadata_map["hiap"])

    def __call__(self, data: bytes, most: int = 5) -> list[dict[str, object]]:
        """The most likely classes of an image, with their probabilities."""
        logits = self.session.run(None, {self.about["input"]: self.prepare(data)})[0][0]
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        names = self.about["class_names"] or list(range(len(shares)))
        return [{"class": names[i], "probability": float(shares[i])} for i in np.argsort(-shares)[:most]]

    def prepare(self, data: bytes) -> np.ndarray:
        """Normalised pixels (1, C, H, W), prepared as the file says."""
        about = self.about
        image = Image.open(io.BytesIO(data)).convert("RGB" if about["channels"] == 3 else "L")
        (height, width), resample = about["size"], Image.Resampling[about["interpolation"].upper()]
        if about["crop_mode"] == "squash":
            image = image.resize((width, height), resample)
        else:  # a centre crop cuts off the border
            image = ImageOps.fit(image, (width, height), resample, (1 - about["crop_pct"]) / 2)
        pixels = np.asarray(image).reshape(height, width, -1) / 255
        return ((pixels - about["mean"]) / about["std"]).astype(np.float32).transpose(2, 0, 1)[None]


def make_server(file: str, port: int) -> ThreadingHTTPServer:
    classify = Classifier(file)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = self.headers.get("Content-Length", "none")
            size = int(told) if told.isdecimal() else 0
            try:
                if not 0 < size <= LARGEST:
                    raise ValueError(
                        f"Content-Length must be that of an image of at most {LARGEST} bytes; found {told}"
                    )
                status, found = 200, classify(self.rfile.read(size))
            except (OSError, ValueError, Image.DecompressionBombError) as error:  # Pillow cannot read it, or refuses to
                status, found = 400, {"error": str(error)}
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    make_server(options.file, options.port).serve_forever()
