"""Checks the Dockerfile without Docker: runs its RUN and COPY lines in a clean Debian root, serves there, and asks.

sudo python deploy/check_image.py [--target cpu] [--keep DIR]

Needs root, debootstrap and a network. A root that debootstrap makes of bookworm stands for `debian:bookworm-slim`. The GPU
that the cuda image is meant for is not there: that image is built, and serves on the CPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from dockerfile import Instruction, Stage, assignments, copied_from, needed, read_dockerfile

ROOT = Path(__file__).parents[1]
IMAGES = {"debian:bookworm-slim": "bookworm"}
"""Images that FROM may name, and the release of Debian that stands for each."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 300.0
KEY = "a-key-for-the-check"
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France? Answer with one word."}],
    "temperature": 0,
    "max_tokens": 16,
}


def main() -> int:
    options = _parser().parse_args()
    if os.geteuid() != 0:
        raise SystemExit("this needs root: it changes into another root directory")
    stages = needed(read_dockerfile(ROOT / "Dockerfile"), options.target)
    place = Path(options.keep) if options.keep else Path(tempfile.mkdtemp(prefix="bough-image-"))
    place.mkdir(parents=True, exist_ok=True)
    builder = Builder(place, options)
    try:
        built: dict[str, Image] = {}
        for stage in stages:
            built[stage.name] = builder.build(stage, built)
        serve_and_ask(built[options.target], options)
    finally:
        if not options.keep:
            shutil.rmtree(place, ignore_errors=True)
    print(f"the image {options.target} builds, serves, answers, and ends when it is asked to")
    for line in NOT_CHECKED:
        print(f"not checked: {line}")
    return 0


NOT_CHECKED = (
    "that debian:bookworm-slim is like debootstrap's root; layers, VOLUME and EXPOSE, which Docker alone knows",
    "that a GPU is visible in the image cuda: --gpus all and NVIDIA's container toolkit put it there",
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", help="stage to build (%(default)s)")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="an ARG's value")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for RUN lines, e.g. of pip")
    parser.add_argument("--bind", action="append", default=[], metavar="PATH", help="of this machine, readable there")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian", help="of Debian (%(default)s)")
    parser.add_argument("--base", default="", metavar="DIR", help="a root that debootstrap has made before")
    parser.add_argument("--keep", default="", metavar="DIR", help="build here, and keep it")
    parser.add_argument("--no-compiler", action="store_true", help="fail if the image has a C++ compiler")
    return parser


class Image:
    """A root directory and how its server is started."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ: dict[str, str] = {"PATH": DEFAULT_PATH}
        self.workdir = "/"
        self.user = "root"
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        self.healthcheck = ""

    def copy(self, root: Path) -> Image:
        """An image that begins where this one ends."""
        made = Image(root)
        made.environ = dict(self.environ)
        made.workdir, made.user, made.healthcheck = self.workdir, self.user, self.healthcheck
        made.entrypoint, made.command = list(self.entrypoint), list(self.command)
        return made


class Builder:
    """Makes images of stages, one directory each."""

    def __init__(self, place: Path, options: argparse.Namespace) -> None:
        self._place = place
        self._options = options
        self._given = dict(each.partition("=")[::2] for each in options.build_arg)
        self._ignore = _ignored(ROOT / ".dockerignore")

    def build(self, stage: Stage, built: dict[str, Image]) -> Image:
        root = self._place / stage.name
        if root.exists():
            shutil.rmtree(root)
        if stage.base in built:
            _copy_root(built[stage.base].root, root)
            image = built[stage.base].copy(root)
        else:
            _copy_root(self._debian(stage.base), root)
            image = Image(root)
        arguments: dict[str, str] = {}
        for step in stage.instructions:
            print(f"{stage.name}: {step.name} {step.text[:150]}", flush=True)
            self._run(step, image, arguments, built)
        return image

    def _debian(self, image: str) -> Path:
        """A clean root, made once."""
        if image not in IMAGES:
            raise SystemExit(f"FROM {image}: only {', '.join(IMAGES)} can be made here")
        root = Path(self._options.base) if self._options.base else self._place / "debian"
        if not (root / "etc" / "debian_version").exists():
            command = ["debootstrap", "--variant=minbase", IMAGES[image], str(root), self._options.mirror]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return root

    def _run(self, step: Instruction, image: Image, arguments: dict[str, str], built: dict[str, Image]) -> None:
        match step.name:
            case "ARG":
                for name, value in assignments(step.text).items():
                    arguments[name] = self._given.get(name, value)
            case "ENV":
                image.environ |= assignments(step.text)
            case "WORKDIR":
                image.workdir = step.text
                (image.root / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = step.text
            case "ENTRYPOINT":
                image.entrypoint = step.words()
            case "CMD":
                image.command = step.words()
            case "HEALTHCHECK":
                image.healthcheck = step.text.partition("CMD ")[2]
            case "COPY":
                self._copy(step, image, built)
            case "RUN":
                environ = {**image.environ, **arguments, **dict(each.partition("=")[::2] for each in self._options.env)}
                done = inside(image, ["/bin/sh", "-c", step.text], environ, self._options.bind)
                if done.wait():
                    raise SystemExit(f"line {step.line} failed with status {done.returncode}")

    def _copy(self, step: Instruction, image: Image, built: dict[str, Image]) -> None:
        source = copied_from(step)
        *names, target = [word for word in step.words() if not word.startswith("--")]
        place = image.root / os.path.join(image.workdir, target).lstrip("/")
        for name in names:
            origin = (built[source].root if source else ROOT) / name.lstrip("/")
            if origin.is_dir():
                keep = None if source else self._keep(origin)
                shutil.copytree(origin, place, dirs_exist_ok=True, symlinks=True, ignore=keep)
            else:
                folder = place if target.endswith("/") or len(names) > 1 else place.parent
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(origin, folder / origin.name if folder == place else place)

    def _keep(self, origin: Path) -> Any:
        """For `copytree`: leaves out what .dockerignore does."""

        def ignore(folder: str, names: list[str]) -> list[str]:
            return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in self._ignore)]

        return ignore


def _ignored(path: Path) -> list[str]:
    """Names that .dockerignore leaves out wherever they are (`**/NAME`)."""
    return [line[3:] for line in path.read_text().splitlines() if line.startswith("**/")]


def _copy_root(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(target)], check=True)
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", target / "etc" / name)


def inside(
    image: Image, command: list[str], environ: dict[str, str], binds: list[str], *, as_user: bool = False
) -> subprocess.Popen[bytes]:
    """Starts a command in an image, in namespaces of its own: what it mounts goes with it."""
    root = image.root
    mounts = [
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
        f"mount -t tmpfs tmpfs {root}/tmp",
        *(_bind(root, Path(path)) for path in binds),
    ]
    user = [f"--userspec={image.user}"] if as_user else []
    chroot = shlex.join(
        ["chroot", *user, str(root), "/bin/sh", "-c", f"cd {image.workdir} && exec {shlex.join(command)}"]
    )
    script = " && ".join([*mounts, f"exec {chroot}"])
    home = f"/home/{image.user}" if as_user and image.user != "root" else "/root"
    return subprocess.Popen(
        ["unshare", "--mount", "--fork", "--kill-child", "/bin/sh", "-c", script],
        env={"HOME": home, **environ},
        start_new_session=True,
    )


def _bind(root: Path, path: Path) -> str:
    there = shlex.quote(str(root) + str(path))
    make = f"mkdir -p {there}" if path.is_dir() else f"mkdir -p $(dirname {there}) && touch {there}"
    return f"{make} && mount --bind -o ro {shlex.quote(str(path))} {there}"


def serve_and_ask(image: Image, options: argparse.Namespace) -> None:
    """Starts the image's server as its user, waits for its probe, asks it, runs the health check, and ends it."""
    if options.no_compiler and any((image.root / "usr" / "bin" / name).exists() for name in ("g++", "clang++", "c++")):
        raise SystemExit("the image has a C++ compiler")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**image.environ, "BOUGH_PORT": str(port), "BOUGH_API_KEY": KEY}
    server = inside(image, [*image.entrypoint, *image.command], environ, [], as_user=True)
    try:
        _wait_ready(server, port)
        answer = _ask(port)
        text = answer["choices"][0]["message"]["content"]
        print(f"asked for the capital of France, it answered: {text!r}")
        if "Paris" not in text:
            raise SystemExit("that is wrong")
        check = inside(image, ["/bin/sh", "-c", image.healthcheck], environ, [], as_user=True)
        if check.wait():
            raise SystemExit(f"the health check failed: {image.healthcheck}")
    finally:
        _end(server)
    if server.returncode not in (0, -signal.SIGTERM):
        raise SystemExit(f"the server ended with status {server.returncode}")


def _wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server was not ready within {START_S:g} s")


def _ask(port: int) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(QUESTION).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, as Docker does; it drains and ends its own processes."""
    if server.poll() is None:
        for pid in _children(server.pid):
            os.kill(pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


if __name__ == "__main__":
    sys.exit(main())
