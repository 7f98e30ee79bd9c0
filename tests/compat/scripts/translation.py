"""Translation of sequences into their reverse, with a loss scale whose rule the recipe sets."""

import argparse

import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_

from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--math", default="fp16", choices=["fp16", "fp32"])
parser.add_argument("--opt-level", default="O2")
args = parser.parse_args()

VOCAB, BOS = 9, 8


class Seq2Seq(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.encoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.decoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.classifier = nn.Linear(2 * hidden, VOCAB)

    def forward(self, source, target):
        memory, state = self.encoder(self.embed(source))
        queries, _ = self.decoder(self.embed(target), state)
        attention = torch.bmm(queries, memory.transpose(1, 2)).softmax(-1)
        return self.classifier(torch.cat([queries, torch.bmm(attention, memory)], dim=-1))


class Fp16Optimizer:
    """Backward, clipping and step of mixed precision."""

    def __init__(self, model, optimizer, init_scale=8192, scale_window=4, max_scale=2**15):
        self.optimizer = optimizer
        scaler = amp._amp_state.loss_scalers[0]
        scaler._loss_scale = init_scale
        scaler._scale_seq_len = scale_window
        scaler._max_loss_scale = max_scale

    def step(self, loss):
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        clip_grad_norm_(amp.master_params(self.optimizer), 5.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Fp32Optimizer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def step(self, loss):
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


torch.manual_seed(1)
model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
if args.math == "fp16":
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        loss_scale="dynamic",
        cast_model_outputs=torch.float16,
    )
    trainer = Fp16Optimizer(model, optimizer)
else:
    trainer = Fp32Optimizer(model, optimizer)
criterion = nn.CrossEntropyLoss()
scales = []
for i in range(40):
    generator = torch.Generator().manual_seed(i)
    source = torch.randint(0, BOS, (32, 4), generator=generator)
    labels = source.flip(1)
    target = torch.cat([torch.full((32, 1), BOS), labels[:, :-1]], dim=1)
    output = model(source, target)
    loss = criterion(output.reshape(-1, VOCAB).float(), labels.reshape(-1))
    trainer.step(loss)
    if args.math == "fp16":
        scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
if args.math == "fp16":
    assert scales[:12] == 3 * [2**13] + 4 * [2**14] + 5 * [2**15], scales
    assert scales[-1] == 2**15
print("final loss: %.6f" % loss.item())
