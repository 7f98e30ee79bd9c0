"""A GAN with two optimizers and three losses, the way the DCGAN example did it."""

import argparse

import torch
import torch.nn as nn
import torch.optim as optim

from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", "--opt-level", default="O1", help='amp opt_level, default="O1"')
parser.add_argument("--no-amp", action="store_true")
opt = parser.parse_args()
torch.manual_seed(2809)
BATCH_SIZE = 16

netG = nn.Sequential(
    nn.ConvTranspose2d(8, 8, 4, 1, 0, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False),
    nn.BatchNorm2d(8),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
)
criterion = nn.BCEWithLogitsLoss()
real_label = 1
fake_label = 0

optimizerD = optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.002, betas=(0.5, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG],
    [optimizerD, optimizerG],
    enabled=not opt.no_amp,
    opt_level=opt.opt_level,
    num_losses=3,
)

data = torch.rand(BATCH_SIZE, 1, 8, 8) * torch.linspace(0, 1, 8)
for i in range(12):
    # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
    # train with real
    netD.zero_grad()
    label = torch.full((BATCH_SIZE,), real_label, dtype=torch.float)
    errD_real = criterion(netD(data), label)
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()

    # train with fake
    fake = netG(torch.randn(BATCH_SIZE, 8, 1, 1))
    label.fill_(fake_label)
    errD_fake = criterion(netD(fake.detach()), label)
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    errD = errD_real + errD_fake
    optimizerD.step()

    # (2) Update G network: maximize log(D(G(z)))
    netG.zero_grad()
    label.fill_(real_label)  # fake labels are real for generator cost
    errG = criterion(netD(fake), label)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
print("final loss: %.6f" % (errD.item() + errG.item()))
