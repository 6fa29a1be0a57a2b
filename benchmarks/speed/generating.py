"""Point 7: generation with a key/value cache, beside a plain torch decoder and the GPT-2 of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch

from benchmarks.generation import BATCH, PROMPT, SIZES, VOCAB, Plain, under
from benchmarks.speed.peers import later
from benchmarks.speed.timing import interleaved
from odeformer import BlockConfig, Decoder, DecoderConfig, lay_out

PLAIN, GPT2, RK4 = 1.02, 1.0, 4.1


def cases(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A size each."""
    for size, new in settings["new_tokens"].items():
        yield {"size": size, "new_tokens": new}


def gpt2(d_model: int, n_layers: int, tokens: torch.Tensor, n: int) -> Callable[[], Any]:
    """transformers' GPT-2 of this size with random weights, greedy, with its cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCAB, n_positions=PROMPT + n, n_embd=d_model, n_layer=n_layers,
                        n_head=d_model // 64, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = GPT2LMHeadModel(config).eval()

    def call() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=n, min_new_tokens=n,
                                  do_sample=False)

    if call().shape[1] != PROMPT + n:
        raise RuntimeError("GPT-2 wrote another number of tokens")
    return call


def measure(case: dict[str, Any], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Whole texts in turn; ours also with its weights laid out for single rows (``lay_out``). Raises AssertionError
    where Euler and the plain decoder write different ones."""
    torch.manual_seed(0)
    size, n = SIZES[case["size"]], case["new_tokens"]
    d_model, n_layers = size["d_model"], size["n_layers"]
    base = Decoder(DecoderConfig(vocab_size=VOCAB, max_seq_len=PROMPT + n, n_layers=n_layers,
                                 block=BlockConfig(d_model, d_model // 64))).eval()
    by_columns = lay_out(deepcopy(base))
    plain, rk4, tokens = Plain(base), under(base, "rk4"), torch.randint(VOCAB, (BATCH, PROMPT))
    if not torch.equal(base.generate(tokens, max_new_tokens=n), plain.generate(tokens, n)[0]):
        raise AssertionError("euler and the plain decoder wrote different texts")
    times = interleaved({"euler, by columns": lambda: by_columns.generate(tokens, max_new_tokens=n),
                         "euler": lambda: base.generate(tokens, max_new_tokens=n),
                         "plain decoder": lambda: plain.generate(tokens, n),
                         "GPT-2, transformers": later(gpt2, d_model, n_layers, tokens, n),
                         "rk4": lambda: rk4.generate(tokens, max_new_tokens=n)}, rounds, seconds)
    where = f"{n_layers} layers of {d_model}"
    return [times.ratio(f"cached generation over a plain decoder, {where}", "euler", "plain decoder", PLAIN),
            times.ratio(f"cached generation over transformers, {where}", "euler", "GPT-2, transformers", GPT2),
            times.ratio(f"cached generation over transformers, weights by columns, {where}", "euler, by columns",
                        "GPT-2, transformers", GPT2),
            times.ratio("cached generation, rk4 over Euler", "rk4", "euler", RK4, note=where)]
