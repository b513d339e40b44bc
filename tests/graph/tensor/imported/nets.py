"""Two networks of PyTorch, a convolutional one and a transformer, and their files by both of its exporters.

    python -m tests.graph.tensor.imported.nets     # writes exported/*.onnx again; dynamo=True needs onnxscript

The files are kept since an import of onnxscript and an export take ten seconds.  They have the weights of `seeded`, and
are exported as docs/howto/fine-tuning.md says, so that weights keep PyTorch's names.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

FOLDER = Path(__file__).parent / "exported"
EXPORTERS = {"TorchScript": False, "dynamo": True}
# Without them, exporters transpose and merge weights, and name the results by counts.
KEEPING_NAMES: dict[bool, dict[str, Any]] = {
    False: {"do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE},
    True: {"optimize": False},
}


class Convolutional(nn.Module):
    """Convolutions, one of them without a bias, BatchNormalization, and Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.norm = nn.BatchNorm2d(4)
        self.layer2 = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Dropout(0.5))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.pool(self.layer2(self.norm(self.layer1(x)))), 1))


class Transformer(nn.Module):
    """Two encoder layers between tables of tokens and positions and a head without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.positions = nn.Parameter(torch.zeros(6, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Sequential(nn.Linear(8, 5, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.encoder(self.tokens(x) + self.positions))).mean(1)


NETS = {"convolutional": Convolutional, "transformer": Transformer}


def seeded(name: str) -> nn.Module:
    """Return a network for inference, with the weights of its files."""
    torch.manual_seed(0)
    net = NETS[name]()
    with torch.no_grad():
        for (
            parameter
        ) in net.parameters():  # layers begin alike, and the older exporter writes equal weights once
            parameter += 0.1 * torch.randn_like(parameter)
        for buffer_name, buffer in net.named_buffers():
            if "running" in buffer_name:
                buffer += torch.rand_like(buffer)
    return net.eval()


def batch(name: str, rows: int = 3) -> torch.Tensor:
    """Return seeded inputs."""
    torch.manual_seed(1)
    return torch.randn(rows, 1, 8, 8) if name == "convolutional" else torch.randint(0, 16, (rows, 6))


def exported(name: str, *, dynamo: bool) -> onnx.ModelProto:
    """Return what an exporter writes of a network, without metadata that no test reads."""
    options = {"input_names": ["x"], "output_names": ["logits"], "opset_version": 20, **KEEPING_NAMES[dynamo]}
    file = io.BytesIO()
    if dynamo:
        options |= {"dynamic_shapes": ({0: torch.export.Dim("N")},), "external_data": False, "verbose": False}
    else:
        options |= {"dynamic_axes": {"x": {0: "N"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(seeded(name), (batch(name),), file, dynamo=dynamo, **options)
    proto = onnx.load_from_string(file.getvalue())
    proto.graph.doc_string = ""
    del proto.metadata_props[:]
    for held in (*proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        held.doc_string = ""
        del held.metadata_props[:]
    del proto.graph.metadata_props[:]
    return proto


def path(name: str, exporter: str) -> Path:
    """Return the path of a network's file."""
    return FOLDER / f"{name}_{exporter.lower()}.onnx"


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name in NETS:
        for exporter, dynamo in EXPORTERS.items():
            onnx.save(exported(name, dynamo=dynamo), path(name, exporter))


if __name__ == "__main__":
    main()
