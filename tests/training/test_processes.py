import os

import torch
import torch.multiprocessing as mp
from accelerate import Accelerator
from torch import nn

from hf_sphere.data import ImagesInMemory
from hf_sphere.nn import HeadOutput
from hf_sphere.training import TrainingArguments, TrainingLoop


class NormalizedClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(36)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(36, 3)
        self.dropped = torch.empty(0)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> HeadOutput:
        hidden = self.dropout(self.norm(pixel_values.flatten(1)))
        self.dropped = hidden.detach() == 0
        logits = self.out(hidden)
        return HeadOutput(logits=logits, loss=nn.functional.cross_entropy(logits, labels))


def _train(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (24, 1, 6, 6), dtype=torch.uint8), torch.arange(24) % 3
    accelerator = Accelerator(cpu=True)
    batches = ImagesInMemory(
        images, labels, batch_size=4, mean=[0.5], std=[0.3], shuffle=True, process_index=rank, num_processes=2
    )
    seen = {}

    def evaluate(model: NormalizedClassifier) -> dict[str, float]:
        seen.update(statistics=model.norm.running_mean.clone(), dropped=model.dropped)
        return {"accuracy": 0.0}

    args = TrainingArguments(output_dir=folder, num_train_epochs=1, disable_tqdm=True)
    TrainingLoop(NormalizedClassifier(), batches, args, accelerator, evaluate=evaluate).run()
    torch.save(seen, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_processes_share_batch_norm_statistics_but_not_dropout_masks(tmp_path, free_port):
    mp.spawn(_train, args=(free_port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert torch.equal(first["statistics"], second["statistics"])
    assert not torch.equal(first["dropped"], second["dropped"])
