"""Public mode: the config of a hub model, and nothing else of it, small and at most once."""

from __future__ import annotations

from pathlib import Path

MAX_CONFIG = 1 << 20
_SECONDS = 5
_MOST = 2000


class Configs:
    """Downloads into ``cache``, a folder that the workers may read."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._asked: set[tuple[str, str | None]] = set()

    def fetch(self, repo: str, revision: str | None) -> bool:
        """Whether a config arrived now. A model is asked for once; what fails stays unknown, and the plan says so."""
        if (repo, revision) in self._asked or len(self._asked) >= _MOST:
            return False
        self._asked.add((repo, revision))
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        try:
            url = hf_hub_url(repo, "config.json", revision=revision)
            size = get_hf_file_metadata(url, token=False, timeout=_SECONDS).size
            if size is None or size > MAX_CONFIG:
                return False
            hf_hub_download(repo, "config.json", revision=revision, cache_dir=self.cache, token=False,
                            etag_timeout=_SECONDS)  # fmt: skip
        except Exception:  # whatever the network or the name does: the worker then tells that the config is not known
            return False
        return True
