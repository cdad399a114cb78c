"""Small replicas of DataComp's 38 tasks, a tiny exported model, and a plain script that scores them.

The script uses open_clip and scikit-learn only, nothing of fastclip.
"""

import csv
import io
import json
import tarfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import open_clip
import torch
from PIL import Image
from sklearn.metrics import f1_score, jaccard_score, recall_score

import fastclip.evaluation
from fastclip.cli import main
from fastclip.datasets import scenes
from fastclip.model import build_model
from fastclip.training.export import export
from tests.data.collections import encode, write_tar

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
}
WORDS = ["red", "green", "blue", "black", "small", "large", "round", "flat"]
COLUMNS = {  # of the .npy; the first is the group
    "wilds/iwildcam": 9,
    "wilds/camelyon17": 3,
    "wilds/fmow": 3,
    "fairness/dollar_street": 3,
    "fairness/geode": 2,
}


def datacomp_rows():
    """The table of tasks, read without the code under test."""
    table = Path(fastclip.evaluation.__file__).with_name("datacomp_tasks.csv")
    with table.open() as file:
        return list(csv.DictReader(file))


def tiny_export(folder, seed=0):
    """An exported folder of an untrained model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "tiny-replica.json"
    config.write_text(json.dumps(MODEL))
    return export(build_model(str(config), device="cpu", seed=seed), folder / "model", tau=0.05)


def png(number, format="PNG"):
    """An image of few colours; even an untrained model distinguishes some of them."""
    blocks = np.random.default_rng(number).integers(0, 255, (2, 3, 3), dtype=np.uint8)
    return encode(Image.fromarray(blocks).resize((20, 18), Image.Resampling.NEAREST), format)


def tiny_run(folder):
    """The folder of a short run on scenes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "tiny-replica.json"
    config.write_text(json.dumps(MODEL))
    scenes.draw_shard(folder / "train.tar", 0, 60)
    options = {
        "config": "scenes",
        "out": folder / "run",
        "model.name": config,
        "data.train": folder / "train.tar",
        "evaluate.pairs": folder / "train.tar",
        "epochs": 2,
        "batch.size": 30,
    }
    arguments = [str(text) for name, value in options.items() for text in (f"--{name}", value)]
    with redirect_stdout(io.StringIO()):
        assert main(["train", *arguments]) == 0
    return folder / "run"


def write_classification(folder, seed=0, images=19, classes=6, columns=0, shards=2):
    """Images with a .cls, in shards of unequal size; with `columns`, groups in a .npy."""
    rng = np.random.default_rng(seed)
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text("\n".join(f"{WORDS[c]} thing" for c in range(classes)) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\nthe {c}\n")
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    for shard, numbers in enumerate(np.array_split(np.arange(images), shards)):
        members = []
        for i in numbers.tolist():
            members += [(f"s{i:04d}.png", png(1000 * seed + i))]
            members += [(f"s{i:04d}.cls", str(rng.integers(classes)).encode())]
            if columns:
                members += [(f"s{i:04d}.npy", npy(rng.integers(0, 3, columns)))]
        write_tar(folder / "test" / f"{shard}.tar", members)
    return folder


def write_retrieval(folder, seed=0, images=9):
    """Images with one to three captions each."""
    rng = np.random.default_rng(seed)
    (folder / "test").mkdir(parents=True)
    (folder / "dataset_type.txt").write_text("retrieval\n")
    (folder / "test" / "nshards.txt").write_text("1")
    members = []
    for i in range(images):
        lines = [" ".join(rng.choice(WORDS, 4)) + f" {seed} {i}" for _ in range(rng.integers(1, 4))]
        members += [(f"{i}.png", png(1000 * seed + i)), (f"{i}.txt", "\n".join(lines).encode())]
    write_tar(folder / "test" / "0.tar", members)
    return folder


def write_winogavil(folder, seed=0, cues=8, images=14):
    """Cues with 5, 6, 10 or 12 candidates."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    names = [f"thing{i}.png" for i in range(images)]
    for i, name in enumerate(names):
        (folder / "images" / name).write_bytes(png(1000 * seed + i))
    entries = []
    for cue in range(cues):
        candidates = rng.choice(names, (5, 6, 10, 12)[cue % 4], replace=False).tolist()
        chosen = rng.choice(candidates, 2 + cue % 3, replace=False).tolist()
        entries.append({"cue": WORDS[cue % 8], "candidates": candidates, "associations": chosen})
    (folder / "associations.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def write_datacomp(folder):
    """All 38 task folders under DataComp's names."""
    for seed, row in enumerate(datacomp_rows(), start=1):
        target = folder / row["folder"]
        if row["key"].startswith("retrieval/"):
            write_retrieval(target, seed)
        elif row["key"] == "misc/winogavil":
            write_winogavil(target, seed)
        else:
            write_classification(target, seed, columns=COLUMNS.get(row["key"], 0))
    return folder


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


class PlainScript:
    """Scores a task folder with open_clip alone, image by image."""

    def __init__(self, exported):
        name = f"local-dir:{exported}"
        self.clip, _, self.preprocess = open_clip.create_model_and_transforms(name)
        self.tokenizer = open_clip.get_tokenizer(name)
        self.clip.eval()

    def scores(self, folder):
        if (folder / "associations.jsonl").exists():
            return self._associations(folder)
        samples = self._samples(folder)
        images = np.stack([self._image(sample.get("png") or sample["jpg"]) for sample in samples])
        kind = folder / "dataset_type.txt"
        if kind.exists() and kind.read_text().strip() == "retrieval":
            return self._retrieval(images, samples)
        return self._classification(folder, images, samples)

    def _classification(self, folder, images, samples):
        names = (folder / "classnames.txt").read_text().splitlines()
        templates = (folder / "zeroshot_classification_templates.txt").read_text().splitlines()
        classes = []
        for name in names:
            mean = np.mean([self._text(template.replace("{c}", name)) for template in templates], axis=0)
            classes.append(mean / np.linalg.norm(mean))
        order = np.argsort(-(images @ np.stack(classes).T), axis=1)
        labels = np.array([int(sample["cls"]) for sample in samples])
        top1, top5 = order[:, 0] == labels, (order[:, :5] == labels[:, None]).any(1)
        over_present = {"average": "macro", "labels": np.unique(labels), "zero_division": 0}
        scores = {
            "acc1": top1.mean(),
            "acc5": top5.mean(),
            "mean_per_class_recall": recall_score(labels, order[:, 0], **over_present),
            "F1-macro_all": f1_score(labels, order[:, 0], **over_present),
        }
        if "npy" in samples[0]:
            groups = np.array([np.load(io.BytesIO(sample["npy"]))[0] for sample in samples])
            scores["acc_wg"] = min(top1[groups == group].mean() for group in set(groups.tolist()))
            scores["acc_top5_wg"] = min(top5[groups == group].mean() for group in set(groups.tolist()))
            scores["acc_worst_region"] = scores["acc_wg"]
        return scores

    def _retrieval(self, images, samples):
        captions = [sample["txt"].decode().split("\n") for sample in samples]
        owner = np.array([i for i, lines in enumerate(captions) for _ in lines])
        texts = np.stack([self._text(line) for lines in captions for line in lines])
        similarity = images @ texts.T
        scores = {}
        for k in (1, 5, 10):
            of_texts = [owner[m] in np.argsort(-similarity[:, m])[:k] for m in range(len(texts))]
            of_images = [i in owner[np.argsort(-similarity[i])[:k]] for i in range(len(images))]
            scores[f"image_retrieval_recall@{k}"] = np.mean(of_texts)
            scores[f"text_retrieval_recall@{k}"] = np.mean(of_images)
        scores["mean_recall@1"] = (scores["image_retrieval_recall@1"] + scores["text_retrieval_recall@1"]) / 2
        return scores

    def _associations(self, folder):
        values, sizes = [], []
        for line in (folder / "associations.jsonl").read_text().splitlines():
            entry = json.loads(line)
            files = [(folder / "images" / name).read_bytes() for name in entry["candidates"]]
            cue = entry["cue"]
            text = self._text(f"{'An' if cue[0] in 'aeiou' else 'A'} {cue}")
            similarity = np.array([self._image(data) @ text for data in files])
            truth = np.isin(entry["candidates"], entry["associations"])
            guess = np.isin(np.arange(len(truth)), np.argsort(similarity)[-truth.sum() :])
            values.append(jaccard_score(truth, guess))
            sizes.append(len(truth))
        values, sizes = np.array(values), np.array(sizes)
        return {
            "avg_jaccard_score": values.mean(),
            "jaccard_score_5-6": values[sizes <= 6].mean(),
            "jaccard_score_10-12": values[sizes >= 10].mean(),
        }

    def _samples(self, folder):
        """The files of each sample by extension, in the order of the shards."""
        samples = []
        for shard in range(int((folder / "test" / "nshards.txt").read_text())):
            parts_of = {}
            with tarfile.open(folder / "test" / f"{shard}.tar") as tar:
                for member in tar:
                    key, extension = member.name.rsplit(".", 1)
                    parts_of.setdefault(key, {})[extension] = tar.extractfile(member).read()
            samples += parts_of.values()
        return samples

    @torch.no_grad()
    def _image(self, data):
        image = self.preprocess(Image.open(io.BytesIO(data)).convert("RGB"))[None]
        return self.clip.encode_image(image, normalize=True)[0].double().numpy()

    @torch.no_grad()
    def _text(self, text):
        return self.clip.encode_text(self.tokenizer([text]), normalize=True)[0].double().numpy()
