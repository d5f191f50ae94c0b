"""Entities of the demo's text: made-up names, and things put together from two words.

Nothing is taken from elsewhere. Which entities are held out is decided by their hash, so that
a held-out conversation speaks of people, towns and things that training never mentions.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Option = TypeVar("Option")


def _words(text: str) -> list[str]:
    return text.split()


ONSETS = _words("B Br C Ch Cl D Dr F Fl G Gr H J K L M N P Pr Qu R S Sh St T Th Tr V W Z")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io")
CODAS = ("l", "n", "r", "s", "d", "m", "ra", "na", "lo", "sa", "mi", "vin", "ton", "ric", "bel")
TOWN_ENDS = ("burg", "dale", "field", "ford", "haven", "holm", "mouth", "stead", "ton", "wick")

ADJECTIVES = _words(
    "amber antique black blue brass bright broad brown carved clear coarse cold copper cotton "
    "cracked curved dark deep dry dusty fine flat folded glass golden green grey heavy hollow "
    "iron ivory large leather light linen little long marble narrow old oval pale paper plain "
    "polished purple quiet red round rusty sharp short silk silver small smooth soft square "
    "stone striped tall thick thin tin velvet warm white wide wooden woollen yellow"
)
NOUNS = _words(
    "anchor apron banner barrel basket bell belt blanket boat book bottle bowl box bridge broom "
    "brush bucket button candle carpet chain chair chest clock coat compass crate cup curtain "
    "desk door drum engine feather fence flag flute fork frame gate glove hammer harp hat helmet "
    "hook jar kettle key kite knife ladder lamp lantern letter lock map mask mat mirror mug "
    "needle net oar organ oven paddle painting pan pencil pillow pipe plate pot purse quilt rake "
    "ribbon ring roof rope rug sack saddle sail scarf shelf shield shovel spoon stamp stool stove "
    "table tent tool towel tray trunk vase violin wagon wheel whistle window"
)
JOBS = _words(
    "actor baker barber builder butcher carpenter clerk cook dentist doctor driver farmer "
    "fisher gardener glazier guard hunter jeweller judge lawyer mason miller miner nurse "
    "painter pilot plumber porter potter printer sailor singer smith tailor teacher weaver"
)
ANIMALS = _words(
    "badger bear beaver camel cat cow crane crow deer dog donkey duck eagle fox frog goat goose "
    "hare hawk hen horse lamb lion lynx mole mouse otter owl parrot pig rabbit raven seal sheep "
    "snail spider swan tiger toad turtle wolf"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
FIELDS = _words(
    "age amount area balance batch brand category channel code colour count country cost degree "
    "depth distance duration energy extent format grade group height hour index kind label layer "
    "length level limit load margin mass method minute mode month name note number offset order "
    "origin owner pace phase pitch power price quality quantity range rank rate ratio reason "
    "region result route score season section serial shape side signal size source speed stage "
    "state status step stock style supply target temperature term title total unit value version "
    "volume voltage week weight width year zone"
)

HELD_OUT_PERCENT = 12


def is_held_out(entity: str) -> bool:
    """Whether an entity is kept for the held-out text."""
    return int(hashlib.sha256(entity.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


class Draw:
    """Draws entities of one side of the split.

    Args:
        seed: of the draws.
        held_out: whether to draw held-out entities, or those of training.
    """

    def __init__(self, seed: int, held_out: bool) -> None:
        self.rng = random.Random(seed)
        self._held_out = held_out

    def _one(self, make: Callable[[], str]) -> str:
        while is_held_out(entity := make()) != self._held_out:
            pass
        return entity

    def pick(self, options: Sequence[Option]) -> Option:
        """Any of the options; they belong to both sides."""
        return self.rng.choice(options)

    def number(self, low: int, high: int) -> int:
        """An integer of both sides, low <= n <= high."""
        return self.rng.randint(low, high)

    def name(self) -> str:
        """A made-up first or last name."""
        return self._one(lambda: self.pick(ONSETS) + self.pick(VOWELS) + self.pick(CODAS))

    def town(self) -> str:
        """A made-up town."""
        return self._one(
            lambda: (
                self.pick(ONSETS) + self.pick(VOWELS) + self.pick("lnrst") + self.pick(TOWN_ENDS)
            )
        )

    def thing(self) -> str:
        """An adjective and a noun."""
        return self._one(lambda: f"{self.pick(ADJECTIVES)} {self.pick(NOUNS)}")

    def code(self) -> str:
        """Two letters and three digits."""
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
        return self._one(
            lambda: f"{self.pick(letters)}{self.pick(letters)}-{self.number(100, 999)}"
        )

    def several(self, make: Callable[[], str], count: int) -> list[str]:
        """`count` different entities."""
        found: list[str] = []
        while len(found) < count:
            if (entity := make()) not in found:
                found.append(entity)
        return found
