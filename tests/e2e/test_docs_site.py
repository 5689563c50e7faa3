"""The site of the documentation in headless Chromium: its text can be read in both themes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import browser, needs_browser

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300), needs_browser]

ROOT = Path(__file__).parents[2]
_CONTRASTS = """
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if (!/, 0\\)$|transparent/.test(color)) return color;
  }
  return 'rgb(255, 255, 255)';
};
const found = {};
for (const selector of ['.md-typeset p', '.md-typeset p a', '.md-typeset h1', '.md-typeset code', '.md-header__title',
                        '.md-nav__link', '.md-typeset pre code']) {
  const node = document.querySelector(selector);
  if (!node) continue;
  const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
  found[selector] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}
return found;
"""


def test_text_stands_out_in_both_themes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240, env={"PATH": "", "NO_MKDOCS_2_WARNING": "1"})
    with browser(tmp_path) as driver:
        driver.get(f"file://{tmp_path}/site/quickstart.html")
        for scheme, ground in (("default", "rgb(255, 255, 255)"), ("slate", "rgb(15, 20, 18)")):
            driver.execute_script("document.body.dataset.mdColorScheme = arguments[0]", scheme)
            driver.execute_script("document.getAnimations().forEach(each => each.finish())")
            assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == ground
            found = driver.execute_script(_CONTRASTS)
            assert len(found) >= 6
            assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}, scheme
