"""FlexAttention's row maxima on a GPU: alone, compiled with a block, in torchtitan's module."""

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex

from titan_muon.optim.qk_clip import QKClip, head_rows, observe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        "max_scores" not in getattr(getattr(flex, "AuxRequest", None), "_fields", ()),
        reason="this torch's flex_attention cannot return row maxima (AuxRequest.max_scores)",
    ),
]
BATCH, LENGTH, DOCUMENT = 2, 384, 150
# Products of bfloat16 numbers are exact in float32; their sums and the kernel's base-2 scale
# round by 1e-6 or so. float32 products may run through TF32 where torch is told so: it is not.
LOGIT = 2e-5

# query heads, key heads, query and key dim, value dim
SHAPES = {"grouped": (8, 2, 64, 64), "multi-head": (4, 4, 128, 128), "latent": (4, 4, 192, 128)}


def causal_documents(batch, head, query, key):
    return (query >= key) & (query // DOCUMENT == key // DOCUMENT)


def block_mask():
    return flex.create_block_mask(causal_documents, None, None, LENGTH, LENGTH, device="cuda")


def tensors(name, dtype, seed=0):
    """Return q, k, v (batch, heads, length, dim), those of head 1 larger than the rest."""
    heads, kv_heads, dim, value_dim = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim)]
    q, k, v = (
        torch.randn(BATCH, n, LENGTH, d, generator=generator).to("cuda", dtype) for n, d in shapes
    )
    q[:, 1] *= 8
    return [x.requires_grad_() for x in (q, k, v)]


def largest(q, k, scale):
    """Return the largest logit of each head in float64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    index = torch.arange(LENGTH, device="cuda")
    mask = causal_documents(0, 0, index[:, None], index)
    logits = scale * q.detach().double() @ k.detach().double().mT
    return logits.masked_fill(~mask, -torch.inf).amax((0, 2, 3))


def attend(q, k, v, mask, scale, max_logits):
    request = flex.AuxRequest(max_scores=max_logits is not None)
    gqa = q.shape[1] != k.shape[1]
    out, aux = flex.flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=gqa, return_aux=request
    )
    if max_logits is not None:
        observe(max_logits, aux.max_scores)
    return out


# In float32 the larger heads do not fit a tile's shared memory.
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in SHAPES), ("grouped", torch.float32)]
)
def test_maxima_are_those_of_float64(name, dtype):
    scale = 0.2
    mask = block_mask()
    compiled = torch.compile(attend)
    expected, results = [], []
    max_logits = torch.full((SHAPES[name][0],), -torch.inf, device="cuda")
    for seed in (0, 1):
        q, k, v = tensors(name, dtype, seed)
        out = compiled(q, k, v, mask, scale, max_logits)
        out.float().square().sum().backward()
        expected.append(largest(q, k, scale))
        results.append((out, q.grad, k.grad, v.grad))
    # Two micro-batches: the larger of both.
    torch.testing.assert_close(
        max_logits.double(), torch.stack(expected).amax(0), rtol=LOGIT, atol=LOGIT
    )
    q, k, v = tensors(name, dtype, 1)
    out = compiled(q, k, v, mask, scale, None)
    out.float().square().sum().backward()
    # The same kernel but for one more store.
    for plain, observed in zip((out, q.grad, k.grad, v.grad), results[1], strict=True):
        torch.testing.assert_close(plain, observed, rtol=1e-2, atol=1e-2)


class Block(nn.Module):
    """Multi-head attention that hands over its row maxima."""

    def __init__(self, heads, dim):
        super().__init__()
        self.heads, self.dim = heads, dim
        width = heads * dim
        self.wq, self.wk, self.wv = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.register_buffer("max_logits", None, persistent=False)

    def forward(self, x, mask):
        shape = (*x.shape[:2], self.heads, self.dim)
        q, k, v = (w(x).view(shape).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = attend(q, k, v, mask, self.dim**-0.5, self.max_logits)
        return x + out.transpose(1, 2).flatten(2)


def test_compiled_blocks_share_one_graph_and_logits_come_down():
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    blocks = nn.Sequential(*(Block(4, 64) for _ in range(2))).cuda()
    threshold = 3.0
    clip = QKClip(threshold)
    for block in blocks:
        with torch.no_grad():
            block.wq.weight.mul_(12)
        rows = head_rows(4, (64, 0.5))
        block.max_logits = clip.add_layer(4, [(block.wq.weight, rows), (block.wk.weight, rows)])
        block.compile(fullgraph=True)
    mask = block_mask()
    x = torch.randn(BATCH, LENGTH, 256, device="cuda")
    found = []
    for _ in range(3):
        h = x
        for block in blocks:
            h = block(h, mask)
        h.square().mean().backward()
        clip.step()
        found.append(clip.metrics()["max_logit"].item())
    assert found[0] > 2 * threshold
    # The first clip moves what the second layer sees; the second clip meets what the third step
    # sees. The kernel's logits may differ from its own by rounding alone.
    assert found[2] < threshold * (1 + 1e-3)
    # The first block's input needs no gradient, the second's does; three steps add nothing.
    assert counters["stats"]["unique_graphs"] <= 2


def test_observing_and_clipping_can_be_captured():
    """A capture fails at any host synchronization."""
    weight = torch.randn(4 * 8, 16, device="cuda")
    before = weight.clone()
    clip = QKClip(2.0)
    max_logits = clip.add_layer(4, [(weight, head_rows(4, (8, 1.0)))])
    logits = torch.zeros(2, 4, 8, device="cuda")
    observe(max_logits, logits)
    clip.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        observe(max_logits, logits)
        clip.step()
    logits[:, 2] = 8.0
    graph.replay()
    factors = torch.tensor([1.0, 1.0, 0.25, 1.0], device="cuda").repeat_interleave(8)[:, None]
    assert torch.equal(weight, before * factors)
    assert clip.metrics()["max_logit"].item() == 8.0
    logits.fill_(1.0)
    graph.replay()
    assert torch.equal(weight, before * factors)


@pytest.mark.parametrize("name", SHAPES)
def test_torchtitan_attention(name):
    pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")
    from torchtitan.models.common.attention import FlexAttention

    from titan_muon.integration.max_logits import reporting

    config = FlexAttention.Config()
    own, stock = reporting(config).build().cuda(), config.build().cuda()
    own.max_logits = torch.full((SHAPES[name][0],), -torch.inf, device="cuda")
    mask, scale = block_mask(), 0.2
    options = {"attention_masks": mask, "scale": scale, "enable_gqa": name == "grouped"}
    results = []
    for module in (own, stock):
        q, k, v = tensors(name, torch.bfloat16)
        out = module(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        out.float().square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for observed, plain in zip(*results, strict=True):
        # Autotuning may choose other tiles for either, which sum in another order.
        torch.testing.assert_close(observed, plain, rtol=2e-2, atol=2e-2)
    expected = largest(q, k, scale)
    torch.testing.assert_close(own.max_logits.double(), expected, rtol=LOGIT, atol=LOGIT)
    own.max_logits.fill_(-torch.inf)
    with torch.no_grad():
        own(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    assert own.max_logits.eq(-torch.inf).all()
    # As gpt_oss asks for: the log-sum-exp, (batch, length, heads), comes with the maxima.
    seen = []
    transform = lambda out, lse: (seen.append(lse.shape), out)[1]  # noqa: E731
    own(*(x.transpose(1, 2) for x in (q, k, v)), **options, out_transform=transform)
    assert seen == [(BATCH, LENGTH, SHAPES[name][0])]
    torch.testing.assert_close(own.max_logits.double(), expected, rtol=LOGIT, atol=LOGIT)
