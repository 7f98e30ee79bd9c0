"""Click-through rates: embeddings with an optimizer of their own, apex's MLP under amp."""

import argparse

import torch
import torch.nn as nn

try:
    from apex import amp, mlp, parallel
except ImportError:
    mlp = None

parser = argparse.ArgumentParser()
parser.add_argument("--mlp", default="TorchMlp", help="or CppMlp, or AmpMlp")
parser.add_argument("--amp", action="store_true")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--save", default="")
parser.add_argument("--resume", default="")


class TorchMlp(nn.Module):
    def __init__(self, input_dim, sizes):
        super().__init__()
        layers = []
        for output_dim in sizes:
            linear = nn.Linear(input_dim, output_dim)
            nn.init.normal_(linear.weight.data, 0.0, (2.0 / (input_dim + output_dim)) ** 0.5)
            nn.init.normal_(linear.bias.data, 0.0, (1.0 / output_dim) ** 0.5)
            layers += [linear, nn.ReLU()]
            input_dim = output_dim
        self.layers = nn.Sequential(*layers)

    @property
    def weights(self):
        return [layer.weight for layer in self.layers if isinstance(layer, nn.Linear)]

    @property
    def biases(self):
        return [layer.bias for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, x):
        return self.layers(x)


class CppMlp(nn.Module):
    def __init__(self, input_dim, sizes):
        super().__init__()
        self.mlp = mlp.MLP([input_dim] + list(sizes))
        self.weights, self.biases = self.mlp.weights, self.mlp.biases

    def forward(self, x):
        return self.mlp(x)


class AmpMlp(CppMlp):
    def forward(self, x):
        args = self.mlp.bias, self.mlp.activation, x, *self.mlp.weights, *self.mlp.biases
        return mlp.MlpFunction.apply(*args)


class Dlrm(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.bottom = kind(6, [16, 8])
        self.top = nn.Sequential(kind(16, [24, 12]), nn.Linear(12, 1))

    def forward(self, numerical, embedded):
        bottom = self.bottom(numerical)
        return self.top(torch.cat([bottom, embedded.to(bottom.dtype)], dim=1)).squeeze(-1)


def batches(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(16):
        numerical = torch.randn(64, 6, generator=generator)
        category = torch.randint(10, (64,), generator=generator)
        yield numerical, category, (numerical[:, 0] + category / 5 - 1 > 0).float()


def main():
    args = parser.parse_args()
    torch.manual_seed(3)
    embedding = nn.Embedding(10, 8)
    model = Dlrm(globals()[args.mlp])
    generator = torch.Generator().manual_seed(4)
    for parts in (model.bottom, model.top[0]):  # the same weights, whichever class it is
        for param in [*parts.weights, *parts.biases]:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    model.top[1].weight.data.copy_(torch.randn(1, 12, generator=generator) * 0.3)
    model.top[1].bias.data.zero_()
    embedding_optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    mlp_optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    if args.amp:
        model, mlp_optimizer = amp.initialize(model, mlp_optimizer, opt_level="O2", loss_scale=128)
    epoch = 0
    things = {"embedding": embedding, "model": model, "optimizer": mlp_optimizer}
    if args.resume:
        saved = torch.load(args.resume)
        epoch = saved["epoch"]
        for name, thing in things.items():
            thing.load_state_dict(saved[name])
    for epoch in range(epoch, args.epochs):
        for numerical, category, click in batches(epoch):
            output = model(numerical, embedding(category)).float()
            loss = nn.functional.binary_cross_entropy_with_logits(output, click)
            mlp_optimizer.zero_grad()
            embedding_optimizer.zero_grad()
            if args.amp:
                with amp.scale_loss(loss, mlp_optimizer, delay_overflow_check=True) as scaled_loss:
                    scaled_loss.backward()
                for param in embedding.parameters():
                    param.grad.div_(128)
            else:
                loss.backward()
            mlp_optimizer.step()
            embedding_optimizer.step()
    if args.save:
        saved = {name: thing.state_dict() for name, thing in things.items()}
        torch.save({**saved, "epoch": args.epochs}, args.save)
    with torch.no_grad():
        losses = [
            nn.functional.binary_cross_entropy_with_logits(model(n, embedding(c)).float(), click)
            for n, c, click in batches(1000)
        ]
    print("final loss: %.6f" % torch.stack(losses).mean())


if __name__ == "__main__":
    main()
