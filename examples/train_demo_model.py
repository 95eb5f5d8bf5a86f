"""Train the small Qwen3-MoE language model that ``moe_ops demo`` reads and writes text with.

The text is the documentation inside the Python that runs this script, see ``demo_corpus.py``.

    python examples/train_demo_model.py --output moe_ops/demo/model
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from pathlib import Path

import torch
from demo_corpus import build_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_ops.demo import MODEL

END = "<|endoftext|>"
CONTEXT = 256
VOCABULARY = 2048


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can write down any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    """Encode a text of any length as a vector of token ids."""
    return torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)


def make_model(tokenizer: PreTrainedTokenizerFast, dropout: float) -> Qwen3MoeForCausalLM:
    """Make the untrained model: 4 layers, 16 experts, 4 of them for each token."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=4 * CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    # The plain Python loop over experts trains on every device and in every dtype.
    config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(config)
    for module in (model.model.embed_tokens, *(layer.mlp for layer in model.model.layers)):
        # The text is short and read many times: without dropout it is soon known by heart.
        module.register_forward_hook(
            lambda module, _, output: torch.dropout(output, dropout, module.training)
        )
    return model


@torch.no_grad()
def heldout_loss(model: Qwen3MoeForCausalLM, tokens: torch.Tensor) -> float:
    """Return the mean negative log-likelihood of a token, in nats, over whole windows."""
    model.eval()
    windows = tokens[: tokens.numel() // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = sum(model(batch, labels=batch).loss.item() * len(batch) for batch in windows.split(32))
    model.train()
    return total / len(windows)


def train(
    model: Qwen3MoeForCausalLM,
    tokens: torch.Tensor,
    heldout: torch.Tensor,
    args: argparse.Namespace,
) -> tuple[dict[str, torch.Tensor], int]:
    """Train with AdamW and a cosine schedule.

    Returns:
        The bfloat16 weights with the least held-out loss, and the step they are from.
    """
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * step / args.steps)),
    )
    best, best_weights, best_step, start = math.inf, {}, 0, time.perf_counter()
    for step in range(1, args.steps + 1):
        offsets = torch.randint(tokens.numel() - CONTEXT, (args.batch, 1))
        batch = tokens[(offsets + torch.arange(CONTEXT)).to(tokens.device)]
        loss = model(batch, labels=batch, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % args.eval_every == 0 or step == args.steps:
            held = heldout_loss(model, heldout)
            seconds = time.perf_counter() - start
            print(f"{step=} train={loss.item():.3f} heldout={held:.3f} {seconds:.0f} s", flush=True)
            if held < best:
                best, best_step = held, step
                best_weights = {
                    name: value.to("cpu", torch.bfloat16, copy=True)
                    for name, value in model.state_dict().items()
                }
    return best_weights, best_step


README = r"""# The demo's language model

A Qwen3-MoE language model (`Qwen3MoeForCausalLM`) of {parameters:.2f} million parameters in
bfloat16, with a byte-level BPE tokenizer of {vocabulary} tokens. It is here so that
`python -m moe_ops demo` has a real Mixture-of-Experts model to run; all it learned is the tone of
Python's documentation.

- Data: the documentation inside Python {python}, that is the topics of `pydoc_data`, and the
  docstrings and longer comments of the standard library, without the modules that carry a licence
  notice of their own.
- Licence of the data, of `heldout.txt` and of the weights: PSF-2.0, see `LICENSE.txt` (Python's
  own). Copyright Python Software Foundation; all rights reserved.
- Training text: {train_bytes:,} bytes, {train_tokens:,} tokens; repeated paragraphs removed.
- Held-out text: `heldout.txt`, {heldout_bytes:,} bytes, {heldout_tokens:,} tokens; split off by
  document.
- Training: AdamW with a cosine schedule from {lr}, dropout {dropout}, {batch} windows of
  {context} tokens a step, seed {seed}, torch {torch} on {device}. Of {steps} steps, step
  {best_step} had the least held-out loss.
- Held-out perplexity: {perplexity:.2f} for each token, in windows of {context} tokens.

Made by:

    python examples/train_demo_model.py --steps {steps} --batch {batch} --lr {lr} \
        --dropout {dropout} --seed {seed} --eval-every {eval_every}
"""


def sample(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Continue the prompt greedily by 80 tokens."""
    model.eval()
    ids = encode(tokenizer, prompt)[None].to(model.device)
    return tokenizer.decode(model.generate(ids, max_new_tokens=80, do_sample=False)[0])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    output_help = "folder to write to (default: moe_ops/demo/model, the demo's own)"
    parser.add_argument("--output", type=Path, default=MODEL, help=output_help)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    """Build the corpus and the tokenizer, train, and save everything the demo loads."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_text, heldout_text = (END.join(texts) + END for texts in build_corpus())
    tokenizer = train_tokenizer(train_text.split(END))
    tokens, heldout = (encode(tokenizer, text).to(device) for text in (train_text, heldout_text))
    model = make_model(tokenizer, args.dropout).to(device)
    print(f"{model.num_parameters():,} parameters, {tokens.numel():,} training tokens", flush=True)

    weights, best_step = train(model, tokens, heldout, args)
    model.load_state_dict(weights)
    perplexity = math.exp(heldout_loss(model, heldout))
    facts = {
        "parameters": model.num_parameters() / 1e6,
        "vocabulary": len(tokenizer),
        "python": platform.python_version(),
        "train_bytes": len(train_text.encode()),
        "train_tokens": tokens.numel(),
        "heldout_bytes": len(heldout_text.encode()),
        "heldout_tokens": heldout.numel(),
        "context": CONTEXT,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "the CPU",
        "perplexity": perplexity,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "heldout.txt").write_text(heldout_text, encoding="utf-8")
    readme = README.format(**facts, **vars(args), best_step=best_step)
    (args.output / "README.md").write_text(readme, encoding="utf-8")
    tokenizer.save_pretrained(args.output)
    for prompt in ("The with statement", "Return a list of", "json.loads("):
        print(f"--- {sample(model, tokenizer, prompt)}")
    model.to("cpu", torch.bfloat16).save_pretrained(args.output)
    print(f"step {best_step}: held-out perplexity {perplexity:.2f}, saved in {args.output}")


if __name__ == "__main__":
    main()
