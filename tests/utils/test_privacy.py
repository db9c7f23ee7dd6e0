from pathlib import Path

import pytest

from hf_sphere.utils.texts import find_private, hide_private

TOKEN = "hf_" + "Ab1" * 11


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/data/birds", "birds"),
        ("/home/me/my data/birds", "birds"),
        ("--config=/home/me/run.yaml", "--config=run.yaml"),
        ("{weights: /home/me/a.bin, width: 3}", "{weights: a.bin, width: 3}"),
        (str(Path.cwd() / "outputs" / "run"), "outputs/run"),
        *((text, text) for text in ("someone/a-model", "../data/birds", "https://huggingface.co/a/b", "1/2", "/", "")),
        ("a / b", "a / b"),
    ],
)
def test_only_absolute_paths_are_shortened_to_their_names(text, shown):
    assert hide_private(text) == shown


def test_only_paths_that_begin_with_the_working_directory_become_relative(monkeypatch):
    monkeypatch.setattr(Path, "cwd", lambda: Path("/tmp/data"))
    assert hide_private("on /mnt/tmp/data/cifar") == "on cifar"
    assert hide_private("/mnt/tmp/data/cifar") == "cifar"
    assert hide_private("--images=/tmp/data/own/birds") == "--images=own/birds"
    assert hide_private("wrote:/tmp/data/own/birds") == "wrote:own/birds"
    monkeypatch.setattr(Path, "cwd", lambda: Path("/"))
    assert hide_private("https://a.b/c of /data/birds") == "https://a.b/c of birds"


def test_token_is_hidden_everywhere_in_nested_values_and_not_what_begins_like_one():
    values = {"a": [f"https://me:{TOKEN}@hub.co", 3]}
    for paths in (True, False):
        assert hide_private(values, paths=paths) == {"a": ["https://me:<token>@hub.co", 3]}
    assert hide_private("hf_sphere", paths=False) == "hf_sphere"


CREDENTIALS = [
    *("AWS_SECRET_ACCESS_KEY = abcdefgh/ijkl", "sk_live_" + "a1" * 12, "SG." + "a1" * 11 + ".b", "ya29." + "a1" * 12),
    *("dapi" + "0a" * 16, "https://hooks.slack.com/services/T0/B0/x", "AccountKey=abcdefgh=="),
    '"wandb_token": "abcdefghijkl"',
    *("https://host/a?sig=abcdefghijklmnop%3D", "https://host/a?X-Amz-Signature=0123456789abcdef", "pwd=correct-horse"),
    *("Authorization: Basic dXNlcjpwYXNzd29yZA==", "HF_TOKEN=abcdefghijklm", "-----BEGIN OPENSSH PRIVATE KEY-----"),
]


@pytest.mark.parametrize("text", CREDENTIALS)
def test_credentials_of_many_services_are_found(text):
    assert [what[:12] for _, what in find_private(f"first\n{text}", paths=False)] == ["a credential"]


PATHS = ["host:/srv/x", "me@host.org:/data/a", "//server/share/x", '"root": "~alice"', "folder: ~alice"]
PATHS += ["--data=~alice"]
PATHS += ["~alice/x", "file:///data/x", r"C:\data\x", r"\\server\share\x", "/srv/data/x"]


@pytest.mark.parametrize("text", PATHS)
def test_local_paths_of_all_kinds_are_found(text):
    assert [what.split(",")[0] for _, what in find_private(f"first\n{text}")] == ["a local path"]


@pytest.mark.parametrize(
    "text",
    [
        *('"hub_token": "<HUB_TOKEN>"', '"use_auth_token": false', '"pad_token": "beginning_of_sequence"'),
        *("Basic representation-learning", "sk_learn_of_some_long_name", "the password is not stored", "n_sig=3"),
        *("https://host/a//b", "http://a.b:8000/c/d", "s3://bucket/a/b", "a // b", "x //= y", "ratio 3:/4"),
        *("~5 minutes", "about ~half of them", "a/b:c/d", "key: value/other", "torch::nn/x", "| a:/ | b |"),
        *("10:30/11:00", "[a](b/c)"),
    ],
)
def test_settings_addresses_and_numbers_are_neither_credentials_nor_local_paths(text):
    assert [*find_private(text)] == []
