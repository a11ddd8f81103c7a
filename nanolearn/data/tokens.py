"""The token shards of a corpus: each shard of text is tokenised once, kept in the cache, and made ahead of training.

Tokens cost 50 times more to make than to read, so they are made once for a corpus and a tokenizer and then
shared by all ranks and runs through the page cache. The shards that training comes to next are made in the
background (`nanolearn.data.ahead`); those that it comes to last are dropped where disk is short
(`nanolearn.data.space`).
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from nanolearn.data.ahead import AHEAD, Job, Team, share
from nanolearn.data.shard import DamagedShard, TokenShard, read_labels, token_file, tokenise
from nanolearn.data.sources import Source
from nanolearn.data.space import Space
from nanolearn.errors import Unreachable, UserError
from nanolearn.fetch import locked, replacing
from nanolearn.host import cores
from nanolearn.paths import cache_dir
from nanolearn.tokenizer import DESCRIPTION, Tokenizer

OPEN_SHARDS = 8  # files kept mapped; a corpus has thousands
OPEN_IF_BOUNDED = 2  # a dropped file takes its room until it is no longer mapped
TOKENIZER = "tokenizer"  # the folder, beside the shards, of the tokenizer they were made with

AGAIN = 60.0  # seconds until a server that is gone is asked again
Progress = Callable[[int, int | None], None]


class Rows(BaseModel):
    """NAME.rows.json beside a token shard: into how many rows each packer puts it. It outlives the shard."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checksum: int
    rows: dict[str, int]


class TokenStore:
    """The token shards of one split: `names` in the source's fixed order, each tokenised when it is first asked for.

    They lie in `cache_dir()/tokens/SOURCE-TOKENIZER/` and are shared: whoever comes first makes a shard under
    its lock, the others wait for it. `max_shards` keeps the first ones only. With `disk_gb` the cache of the corpus
    (text that can be fetched again, and tokens) is held below so many GB. A server that is gone is asked again for
    `patience` seconds. `progress(done, total)` is told bytes of
    text (total None if the source doesn't know), `say` hears what a person should know. Raises UserError if the
    source has no shard of that split.

    Taught in chapter 02_packing.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        split: str,
        max_shards: int | None = None,
        *,
        disk_gb: float = 0.0,
        patience: float = 0.0,
        progress: Progress | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        every = tuple(source.shards(split))
        self.names = every[:max_shards]
        if not self.names:
            raise UserError(f"{source.name} has no {split} shard", "no other shard may stand in for it")
        self.source, self.tokenizer, self.say, self.patience = source, tokenizer, say, patience
        self.folder = cache_dir() / "tokens" / f"{source.name}-{tokenizer.digest[:12]}"
        hint = source.size_hint(split)
        self._total = hint and hint * len(self.names) // len(every)
        self._done = [0] * len(self.names)
        self._progress = progress
        self._mapped = lru_cache(maxsize=OPEN_IF_BOUNDED if disk_gb else OPEN_SHARDS)(self._ready)
        self._order: Sequence[int] = ()
        self._waited = False
        self._room: threading.Thread | None = None
        self.space = Space(source, self.names, self.folder, disk_gb * 1e9, say) if disk_gb else None

    @property
    def n_shards(self) -> int:
        """Shards of this split."""
        return len(self.names)

    def path(self, index: int) -> Path:
        """Where the tokens of a shard lie, made or not."""
        return token_file(self.folder, self.names[index])

    def is_complete(self) -> bool:
        """Whether every shard has been tokenised."""
        return all(self.path(index).exists() for index in range(self.n_shards))

    def shard(self, index: int) -> TokenShard:
        """One shard, mapped; tokenises it first, or waits for the process that does.

        A damaged file is said aloud and made again. Raises UserError if the shard holds no text, or if its
        tokens were made with another tokenizer.
        """
        return self._mapped(index)

    def prepare(self) -> None:
        """Tokenise all shards now: what a corpus below 100 MB gets before step 0."""
        for index in range(self.n_shards):
            self.shard(index)

    def ahead(self, order: Sequence[int]) -> None:
        """Tell which shards rows will need, the present one first: the next AHEAD are made in the background.

        Returns at once; one process of a machine, its local rank 0, sees to it. Called again and again, with the
        same list as long as the present shard is the same. What goes wrong is met again, and raised, by `shard`.
        """
        begins, self._order = order is not self._order, order
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        self.team.want(order[1 : 1 + AHEAD])
        if begins and self.space and not (self._room and self._room.is_alive()):
            # Looking at thousands of files takes seconds where they lie on a network.
            self._room = threading.Thread(target=self.space.make_room, args=(order, 1 + AHEAD), daemon=True)
            self._room.start()

    @cached_property
    def team(self) -> Team:
        """The background processes of this machine."""
        processes, self._threads_each = share(cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return Team(processes, self.path, self._job, self.say)

    def close(self) -> None:
        """End what is being made in the background."""
        if "team" in self.__dict__:
            self.team.close()

    def rows(self, index: int, packer: str) -> int | None:
        """Into how many rows `packer` puts a shard, if that is on record; fetches and tokenises nothing."""
        found = self._rows(index)
        if found is None or packer not in found.rows:
            return None
        try:
            known = found.checksum == int(read_labels(self.path(index))["checksum"])
        except DamagedShard:
            return None  # it will be made again
        except FileNotFoundError:
            return found.rows[packer]  # dropped: the text is the same when it is fetched again
        return found.rows[packer] if known else None

    def keep_rows(self, index: int, packer: str, rows: int) -> None:
        """Put on record into how many rows `packer` puts a shard."""
        found, checksum = self._rows(index), self.shard(index).checksum
        kept = found.rows if found and found.checksum == checksum else {}
        if kept.get(packer) != rows:
            with replacing(self.path(index).with_suffix(".rows.json")) as path:
                path.write_text(Rows(checksum=checksum, rows=kept | {packer: rows}).model_dump_json(), encoding="utf-8")

    def _rows(self, index: int) -> Rows | None:
        try:
            return Rows.model_validate_json(self.path(index).with_suffix(".rows.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def _job(self, index: int) -> Job:
        self._keep_tokenizer()
        text, place = self.source.path(self.names[index]), self.folder / TOKENIZER
        labels = self._labels(index)
        return Job(str(text), str(self.path(index)), str(place), self.tokenizer.digest, labels, self._threads_each)

    def _keep_tokenizer(self) -> None:
        if not (self.folder / TOKENIZER / DESCRIPTION).exists():
            self.tokenizer.save(self.folder / TOKENIZER)

    def _labels(self, index: int) -> dict[str, str]:
        return {"source": self.source.name, "shard": self.names[index]}

    def _ready(self, index: int) -> TokenShard:
        found = self._look(index)
        if isinstance(found, str):
            if self._order and not self._waited and os.environ.get("LOCAL_RANK", "0") == "0":
                self._waited = True
                self.say(f"waiting for shard {self.names[index]} to be fetched and tokenised")
            with locked(self.path(index)):
                found = self._look(index)
                if isinstance(found, str):
                    found = self._make(index, found)
        self._advance(index, found.text_bytes - self._done[index])
        return found

    def _look(self, index: int) -> TokenShard | str:
        """The shard, or what is wrong with its file ("" if there is none)."""
        if not self.path(index).exists():
            return ""
        try:
            return TokenShard.open(self.path(index), self.tokenizer.digest).verify()
        except DamagedShard as damage:
            return str(damage)

    def _make(self, index: int, damage: str) -> TokenShard:
        if damage:
            self.say(damage)
        self._done[index] = 0
        self._keep_tokenizer()
        text, path = self._text(index), self.path(index)
        tokenise(text, path, self.tokenizer, self._labels(index), cores(), lambda size: self._advance(index, size))
        return TokenShard.open(path, self.tokenizer.digest)

    def _text(self, index: int) -> Path:
        until = time.monotonic() + self.patience
        while True:
            try:
                return self.source.path(self.names[index])
            except Unreachable as error:
                if time.monotonic() >= until:
                    raise
                self.say(f"{error}; it is tried again, for {self.patience / 60:.0f} minutes in all")
                time.sleep(min(AGAIN, self.patience))

    def _advance(self, index: int, size: int) -> None:
        self._done[index] += size
        if self._progress and size:
            self._progress(sum(self._done), self._total)
