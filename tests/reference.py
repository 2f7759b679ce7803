"""The paper's equations, transcribed head by head and gate by gate, with none of the library's code."""

import math

import torch
from torch import Tensor, nn


def gate_values(gate: nn.Module, hard: bool) -> Tensor:
    """Equation 5, or the threshold of section 3.4."""
    if hard:
        return (torch.sigmoid(gate.logit) > 0.5).double().reshape(gate.shape)
    return (1 / (1 + torch.exp(-(gate.logit + gate.noise) / gate.temperature))).reshape(gate.shape)


def naive_forward(model: nn.Module, gates: list[dict[str, nn.Module]], x: Tensor, hard: bool) -> Tensor:
    """Logits of a gated model; `gates` by block and granularity."""
    x = model.patch_embed.forward(x)  # past the hook that draws new noise
    x = model._pos_embed(x)
    x = model.norm_pre(x)
    for block, kinds in zip(model.blocks, gates, strict=True):
        z = {kind: gate_values(gate, hard) for kind, gate in kinds.items()}
        x = x + block.ls1(naive_attention(block.attn, block.norm1(x), z))
        x = x + block.ls2(naive_ffn(block.mlp, block.norm2(x), z))
    return model.forward_head(model.norm(x))


def naive_attention(attn: nn.Module, x: Tensor, z: dict[str, Tensor]) -> Tensor:
    """Equations 1 and 3, and our q/k and attention gates."""
    H, Dh, D = attn.num_heads, attn.head_dim, x.shape[-1]
    W = attn.qkv.weight.reshape(3, H, Dh, D)
    b = attn.qkv.bias.reshape(3, H, Dh) if attn.qkv.bias is not None else torch.zeros(3, H, Dh).to(x)
    out = torch.zeros_like(x)
    for h in range(H):
        Q, K, V = (x @ W[i, h].T + b[i, h] for i in range(3))
        Q, K = attn.q_norm(Q), attn.k_norm(K)
        Q = Q * z["qk_dim"][h] if "qk_dim" in z else Q
        S = torch.softmax(Q @ K.transpose(1, 2) / math.sqrt(Dh), dim=-1)
        head = S @ (V * z["value_dim"][h] if "value_dim" in z else V)
        head = head * z["head"][h] if "head" in z else head
        for j in range(Dh):
            out = out + head[..., j, None] * attn.proj.weight[:, h * Dh + j]
    if attn.proj.bias is not None:
        out = out + attn.proj.bias
    return out * z["attention"] if "attention" in z else out


def naive_ffn(mlp: nn.Module, x: Tensor, z: dict[str, Tensor]) -> Tensor:
    """Equations 2 and 4."""
    out = torch.zeros_like(x)
    for k in range(mlp.fc1.out_features):
        neuron = x @ mlp.fc1.weight[k]
        neuron = neuron if mlp.fc1.bias is None else neuron + mlp.fc1.bias[k]
        neuron = mlp.act(neuron)
        neuron = neuron * z["neuron"][k] if "neuron" in z else neuron
        out = out + neuron[..., None] * mlp.fc2.weight[:, k]
    if mlp.fc2.bias is not None:
        out = out + mlp.fc2.bias
    return out * z["ffn"] if "ffn" in z else out
