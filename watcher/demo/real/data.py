"""What the real job trains on, made on the spot: a corpus of unequal parts, a tokenizer, a model, the job's file.

A word is a token, so that the block counts of ranks can be laid down: one rank's part of the corpus has shorter
records, as rank 3's had in the paper (arXiv 2608.05944, section 5: 53 blocks, 7 steps at 8 blocks each).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SEQUENCE_LENGTH: Final = 64
VOCABULARY_SIZE: Final = 500
MEAN_RECORD_WORDS: Final = 64  # of a record
SHORT_RANK: Final = 3
EOS: Final = "<eos>"
RANKS_PER_NODE: Final = 2


@dataclass(frozen=True, slots=True)
class JobSize:
    """How large the job is. Steps are such that it trains for 10 to 25 s before it parts."""

    nodes: int = 2
    ranks_per_node: int = RANKS_PER_NODE
    short_steps: int = 20  # of the rank that runs out first
    spread_steps: int = 7  # that the others have more

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cores(self) -> int:
        """That all ranks share, so that steps last as long as is laid down here on machines of any size."""
        return self.nodes * max(1, self.ranks_per_node // 4)

    @property
    def accumulation(self) -> int:
        """Blocks in a step of one rank. All ranks share this machine: the more there are, the less each does."""
        return max(1, 32 // self.world)


@dataclass(frozen=True, slots=True)
class JobFiles:
    """Where everything of the job lies, as a user would have it."""

    directory: Path

    @property
    def corpus(self) -> Path:
        return self.directory / "corpus.jsonl"

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def blocks(self) -> Path:
        return self.directory / "blocks"

    @property
    def current(self) -> Path:
        """A link to the run directory of the newest start: what the watcher is told."""
        return self.directory / "current"

    def run(self, evenness: str) -> Path:
        """Each start has its own: the gate refuses one whose ranks spoke a minute ago and cannot be asked for."""
        return self.directory / f"run-{evenness}"

    @property
    def job(self) -> Path:
        return self.directory / "job.toml"


def write_inputs(files: JobFiles, shape: JobSize) -> None:
    """Corpus, tokenizer and model."""
    write_corpus(files.corpus, shape)
    files.model.mkdir()
    write_tokenizer(files.model)
    write_model(files.model)


def write_corpus(path: Path, shape: JobSize) -> None:
    """Records of random length, in the order of ranks; those of one rank are shorter."""
    dice = random.Random(53)
    blocks = (shape.short_steps + shape.spread_steps) * shape.accumulation + shape.accumulation // 2
    rows = blocks * SEQUENCE_LENGTH // (MEAN_RECORD_WORDS + 1)
    short = MEAN_RECORD_WORDS * shape.short_steps / (shape.short_steps + shape.spread_steps)
    with path.open("w", encoding="utf-8") as file:
        for rank in range(shape.world):
            mean = short if rank == SHORT_RANK else MEAN_RECORD_WORDS
            for _ in range(rows):
                count = round(mean * dice.uniform(0.6, 1.4))
                text = " ".join(f"w{dice.randrange(VOCABULARY_SIZE)}" for _ in range(count))
                file.write(json.dumps({"text": text}) + "\n")


def write_tokenizer(directory: Path) -> None:
    """Words apart at spaces, one id each: the format of the tokenizers library."""
    vocabulary = {EOS: 0} | {f"w{number}": number + 1 for number in range(VOCABULARY_SIZE)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": EOS,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": EOS},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def write_model(directory: Path) -> None:
    """A Qwen3 with the parts of the paper's 32 B, at a size that two cores train."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config), "utf-8")


def write_job(files: JobFiles, shape: JobSize, name: str, evenness: str) -> Path:
    """job.toml, and its run directory, which is returned. Strings of TOML are written as JSON's."""
    run = files.run(evenness)
    run.mkdir()
    text = f"""\
name = {json.dumps(name)}
run = {json.dumps(str(run))}
data = {json.dumps(str(files.blocks))}
model = {json.dumps(str(files.model))}

[train]
evenness = {json.dumps(evenness)}
micro_batch = 1
accumulation = {shape.accumulation}
random_weights = true
precision = "fp32"
learning_rate = 1e-3
warmup_steps = 5
step_timeout_seconds = 600.0

[checkpoint]
save_every = 500
"""
    files.job.write_text(text, "utf-8")
    return run


def block_counts(files: JobFiles, shape: JobSize) -> tuple[int, ...]:
    """Blocks of each rank, as packed. Raises OSError, ValueError or KeyError where pack has left no manifest."""
    manifests = [files.blocks / f"rank-{rank:05d}.json" for rank in range(shape.world)]
    return tuple(int(json.loads(path.read_text("utf-8"))["blocks"]) for path in manifests)
