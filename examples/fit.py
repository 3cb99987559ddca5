"""Train a network of your own on data of your own, in twenty lines.

python examples/fit.py
"""

import torch
from torch import nn

import convoy

# 4,000 images of 16x16 pixels: class 0 is brighter on the left, class 1 on the right.
labels = torch.arange(4000) % 2
images = torch.randint(0, 128, (4000, 16, 16), dtype=torch.uint8)
images[labels == 0, :, :8] += 64
images[labels == 1, :, 8:] += 64

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(128, 2)
)
run = convoy.fit(
    model, (images[:3000], labels[:3000]), (images[3000:], labels[3000:]), epochs=3, batch=50
)
print(f"accuracy {run.accuracy:.3f}, checkpoint {run.checkpoint}")
