"""The Hugging Face Trainer with thinwire: a callback is all. Metrics go where the Trainer reports the loss.

torchrun --standalone --nproc-per-node 2 examples/with_transformers.py
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from thinwire.integrations.transformers import ThinwireCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--method", default="adam(warmup=20)")
parser.add_argument("--folder", default="out/transformers")
given = parser.parse_args()

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2))
# Sequences that count: each is (start + position * pace) mod 64, so the next symbol can be learnt.
start, pace = torch.randint(64, (2048, 1)), torch.randint(1, 4, (2048, 1))
sequences = (start + torch.arange(32) * pace) % 64
arguments = TrainingArguments(
    output_dir=given.folder,
    max_steps=given.steps,
    per_device_train_batch_size=16,
    learning_rate=5e-3,
    logging_steps=10,
    use_cpu=True,
    ddp_backend="gloo",
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": each, "labels": each} for each in sequences])
callback = ThinwireCallback(trainer, given.method)
trainer.add_callback(callback)
trainer.train()
if trainer.is_world_process_zero():
    print(f"{callback.session.metrics()['bytes_sent'] / given.steps:,.0f} bytes sent per step")
