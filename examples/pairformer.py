"""Train a small Pairformer on a toy task, with rowmax's attention: seconds on a CPU.

    python examples/pairformer.py

The task: of random points in space, some distances are given; predict the others. Structures of
different lengths are padded to one batch. A block has the layers of AlphaFold 3 (Abramson et al.
2024), without dropout. Shapes: single s [B, N, Cs], pairs z [B, N, N, C], mask [B, N].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from rowmax.integrations.pair_bias import attention_pair_bias, triangle_attention


class TriangleMultiplication(nn.Module):
    """Update each pair (i, j) from the pairs (i, k) and (j, k), or (k, i) and (k, j)."""

    def __init__(self, c: int, incoming: bool) -> None:
        super().__init__()
        self.incoming = incoming
        self.norm, self.norm_out = nn.LayerNorm(c), nn.LayerNorm(c)
        self.values, self.gates = nn.Linear(c, 2 * c), nn.Linear(c, 2 * c)
        self.gate, self.out = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(z)
        pairs = (mask[:, :, None] & mask[:, None])[..., None]
        a, b = (self.values(x) * self.gates(x).sigmoid() * pairs).chunk(2, -1)
        each = "bkic,bkjc->bijc" if self.incoming else "bikc,bjkc->bijc"
        return self.out(self.norm_out(torch.einsum(each, a, b))) * self.gate(x).sigmoid()


class TriangleAttention(nn.Module):
    """Attend along the rows of z (starting node) or along its columns (ending node)."""

    def __init__(self, c: int, heads: int, ending: bool, attend) -> None:
        super().__init__()
        self.heads, self.ending, self.attend = heads, ending, attend
        self.norm = nn.LayerNorm(c)
        self.qkv, self.bias = nn.Linear(c, 3 * c, bias=False), nn.Linear(c, heads, bias=False)
        self.gate, self.out = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(z.transpose(1, 2) if self.ending else z)
        n = x.shape[1]
        # views [B, N, H, N, D] of one projection: nothing is copied
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(2, 4).unbind(3)
        # [B, 1, H, N, N], shared by the rows; as W x^T it is contiguous without a copy
        bias = (self.bias.weight @ x.flatten(1, 2).mT).unflatten(-1, (n, n))[:, None]
        seen = mask[:, None, None, None].expand(-1, n, 1, 1, n)
        out = self.attend(q, k, v, bias, seen).transpose(2, 3).flatten(3)
        out = self.out(out * self.gate(x).sigmoid())
        return out.transpose(1, 2) if self.ending else out


class Transition(nn.Module):
    """Apply a gated multilayer perceptron to each position."""

    def __init__(self, c: int, factor: int = 4) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(c), nn.Linear(c, 2 * factor * c, bias=False)
        self.down = nn.Linear(factor * c, c, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return self.down(silu(a) * b)


class SingleAttention(nn.Module):
    """Attend over the positions of s, with a bias from z."""

    def __init__(self, cs: int, c: int, heads: int, attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_s, self.norm_z = nn.LayerNorm(cs), nn.LayerNorm(c)
        self.q, self.out = nn.Linear(cs, cs), nn.Linear(cs, cs, bias=False)
        self.k, self.v, self.g = (nn.Linear(cs, cs, bias=False) for _ in "kvg")
        self.z = nn.Linear(c, heads, bias=False)

    def forward(self, s: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        return self.attend(
            s, z, mask, self.heads,
            w_ln_a=self.norm_s.weight, b_ln_a=self.norm_s.bias,
            w_proj_q=self.q.weight, b_proj_q=self.q.bias,
            w_proj_k=self.k.weight, w_proj_v=self.v.weight, w_proj_g=self.g.weight,
            w_proj_o=self.out.weight, w_proj_z=self.z.weight,
            w_ln_z=self.norm_z.weight, b_ln_z=self.norm_z.bias,
        )[0]  # fmt: skip


class PairformerBlock(nn.Module):
    """Update z, then s, each layer added to its input. ``attend`` and ``single`` are attention."""

    def __init__(
        self, cs: int, c: int, heads: int, attend=triangle_attention, single=attention_pair_bias
    ) -> None:
        super().__init__()
        self.multiply = nn.ModuleList(TriangleMultiplication(c, x) for x in (False, True))
        self.attend = nn.ModuleList(TriangleAttention(c, heads, x, attend) for x in (False, True))
        self.pair, self.single = Transition(c), Transition(cs)
        self.attend_single = SingleAttention(cs, c, heads, single)

    def forward(self, s: Tensor, z: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        for layer in (*self.multiply, *self.attend):
            z = z + layer(z, mask)
        z = z + self.pair(z)
        s = s + self.attend_single(s, z, mask)
        return s + self.single(s), z


class Model(nn.Module):
    """Predict all distances of points, from those given."""

    def __init__(self, blocks: int = 2, cs: int = 32, c: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.s, self.z = nn.Linear(2, cs), nn.Linear(2, c)
        self.blocks = nn.ModuleList(PairformerBlock(cs, c, heads) for _ in range(blocks))
        self.of_s, self.out = nn.Linear(cs, c), nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 1))

    def forward(self, given: Tensor, mask: Tensor) -> Tensor:
        s, z = self.s(given.mean(2)), self.z(given)
        for block in self.blocks:
            s, z = block(s, z, mask)
        of_s = self.of_s(s)
        return self.out(z + z.transpose(1, 2) + of_s[:, :, None] + of_s[:, None])[..., 0]


def batch(b: int, n: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (given [B, N, N, 2], distances, the pairs to predict, the points in use)."""
    points = torch.randn(b, n, 3, device=device)
    distances = torch.cdist(points, points)
    mask = torch.arange(n, device=device) < torch.randint(n // 2, n + 1, (b, 1), device=device)
    pairs = (mask[:, :, None] & mask[:, None]).triu(1)
    known = pairs & (torch.rand(b, n, n, device=device) < 0.7)
    both = known | known.mT
    return torch.stack((both, distances * both), -1), distances, pairs & ~known, mask


def train(steps: int, b: int = 8, n: int = 12, device: str = "cpu") -> list[float]:
    """Return the loss of each step, relative to the variance of the distances."""
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for _ in range(steps):
        given, distances, wanted, mask = batch(b, n, device)
        error = (model(given, mask) - distances)[wanted].square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        losses.append(error.detach() / distances[wanted].var())
    return torch.stack(losses).tolist()


if __name__ == "__main__":
    losses = train(200, device="cuda" if torch.cuda.is_available() else "cpu")
    for step in range(0, len(losses), 20):
        error = sum(losses[step : step + 20]) / 20
        print(f"steps {step:>3} to {step + 19}: error {error:.2f} of the variance")
