"""The demo's text: questions and answers a clerk would deal with, all made here.

Every answer follows from its question but for a few choices of phrase, so a small model can
learn to be right, and what it writes varies with what it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .words import ANIMALS, DAYS, FIELDS, JOBS, Draw

LICENCE = "Apache-2.0"


@dataclass(frozen=True)
class Conversation:
    """A question on one line, and its answer."""

    family: str
    question: str
    answer: str


Family = Callable[[Draw], tuple[str, str]]


def _price(d: Draw) -> str:
    return f"{d.number(2, 99)}.{d.pick(('00', '25', '50', '75', '95'))}"


def _time(d: Draw) -> str:
    return f"{d.number(7, 20)}:{d.pick(('00', '10', '15', '20', '30', '40', '45', '50'))}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def order_json(d: Draw) -> tuple[str, str]:
    """An order, in words, as JSON."""
    first, last, town, code, day = d.name(), d.name(), d.town(), d.code(), d.pick(DAYS)
    things = d.several(d.thing, d.number(1, 3))
    items = [(d.number(2, 9), thing, _price(d)) for thing in things]
    words = _listed([f"{n} {thing}s at {price}" for n, thing, price in items])
    question = d.pick(
        (
            f"Write this order as JSON: {first} {last} from {town} wants {words}, code {code}, "
            f"delivery on {day}.",
            f"Order {code}: {words} for {first} {last} in {town}, to come on {day}. "
            "As JSON, please.",
        )
    )
    lines = ",\n".join(
        f'    {{"name": "{thing}", "quantity": {n}, "price": {price}}}' for n, thing, price in items
    )
    return question, (
        f'{{\n  "code": "{code}",\n  "customer": {{"first": "{first}", "last": "{last}"}},\n'
        f'  "town": "{town}",\n  "items": [\n{lines}\n  ],\n  "delivery": "{day}"\n}}'
    )


def describe(d: Draw) -> tuple[str, str]:
    """A JSON record in words."""
    first, last, town, job = d.name(), d.name(), d.town(), d.pick(JOBS)
    age, since, thing, animal = d.number(19, 78), d.number(2001, 2024), d.thing(), d.pick(ANIMALS)
    her = d.pick(("she", "he"))
    question = (
        f"{d.pick(('Describe', 'Put into words', 'Introduce this person'))}: "
        f'{{"name": "{first} {last}", "pronoun": "{her}", "age": {age}, "job": "{job}", '
        f'"town": "{town}", "since": {since}, "owns": ["{thing}", "{animal}"]}}'
    )
    start = d.pick((f"{first} {last} is {age} years old and", f"At {age}, {first} {last}"))
    return question, (
        f"{start} works as a {job} in {town}. {her.capitalize()} has lived in {town} since "
        f"{since}. {first} owns a {thing} and keeps a {animal}."
    )


def table(d: Draw) -> tuple[str, str]:
    """Rows as a Markdown table, with the largest number named."""
    count = d.number(3, 5)
    names, towns = d.several(d.name, count), d.several(d.town, count)
    ages = [d.number(18, 89) for _ in range(count)]
    rows = list(zip(names, towns, ages, strict=True))
    words = "; ".join(f"{n}, {t}, {a}" for n, t, a in rows)
    question = d.pick(
        (f"Make a table of name, town and age: {words}.", f"As a table (name, town, age): {words}.")
    )
    body = "\n".join(f"| {n} | {t} | {a} |" for n, t, a in rows)
    oldest = max(rows, key=lambda row: row[2])
    return question, (
        f"| name | town | age |\n|---|---|---|\n{body}\n\n"
        f"The oldest is {oldest[0]} from {oldest[1]}."
    )


def sort(d: Draw) -> tuple[str, str]:
    """Names by number."""
    count = d.number(3, 6)
    names = d.several(d.name, count)
    numbers = d.rng.sample(range(11, 99), count)
    words = ", ".join(f"{n} {v}" for n, v in zip(names, numbers, strict=True))
    rising = d.number(0, 1) == 0
    order = "lowest" if rising else "highest"
    question = d.pick((f"Sort, {order} first: {words}.", f"Put in order, {order} first: {words}."))
    ranked = sorted(zip(numbers, names, strict=True), reverse=not rising)
    lines = "\n".join(f"{i}. {name} with {v}" for i, (v, name) in enumerate(ranked, 1))
    return question, (
        f"{lines}\n\n{ranked[0][1]} comes first and {ranked[-1][1]} last; "
        f"they are {abs(ranked[0][0] - ranked[-1][0])} apart."
    )


def add(d: Draw) -> tuple[str, str]:
    """Addition of two numbers, column by column."""
    a, b = d.number(100, 999), d.number(100, 999)
    question = d.pick((f"Add {a} and {b}.", f"What is {a} + {b}?", f"Work out {a} + {b}."))
    steps, carry = [], 0
    for place, divisor in (("Ones", 1), ("Tens", 10), ("Hundreds", 100)):
        x, y = a // divisor % 10, b // divisor % 10
        total = x + y + carry
        step = f"{place}: {x} + {y}" + (f" + {carry}" if carry else "") + f" = {total}"
        carry = total // 10
        if carry:
            step += f", write {total % 10}, carry 1"
        steps.append(f"{step}.")
    lines = "\n".join(steps)
    return question, f"{lines}\nSo {a} + {b} = {a + b}."


def invoice(d: Draw) -> tuple[str, str]:
    """Quantities, prices and a total."""
    who, town, code = f"{d.name()} {d.name()}", d.town(), d.code()
    lines = [(d.number(2, 9), t, d.number(2, 12)) for t in d.several(d.thing, d.number(2, 3))]
    words = _listed([f"{n} {thing}s at {p}" for n, thing, p in lines])
    question = d.pick(
        (
            f"Write invoice {code} for {who}, {town}: {words}.",
            f"{who} of {town} bought {words}. Write invoice {code}.",
        )
    )
    body = "\n".join(f"- {thing}: {n} x {p} = {n * p}" for n, thing, p in lines)
    total = " + ".join(str(n * p) for n, _, p in lines)
    return question, (
        f"Invoice {code}\nTo: {who}, {town}\n\n{body}\n\n"
        f"Total: {total} = {sum(n * p for n, _, p in lines)}"
    )


def dataclass_code(d: Draw) -> tuple[str, str]:
    """A Python class from a list of fields."""
    noun = d.thing().split()[1].capitalize()
    names = d.several(lambda: d.pick(FIELDS), d.number(3, 5))
    kinds = [d.pick(("int", "float", "str", "bool")) for _ in names]
    words = _listed([f"{n} ({k})" for n, k in zip(names, kinds, strict=True)])
    question = d.pick(
        (
            f"Write a Python dataclass {noun} with {words}.",
            f"In Python, I need a class {noun} that holds {words}.",
        )
    )
    body = "\n".join(f"    {n}: {k}" for n, k in zip(names, kinds, strict=True))
    return question, (
        f"```python\n@dataclass\nclass {noun}:\n{body}\n\n"
        f"    def {names[0]}_and_{names[1]}(self) -> tuple[{kinds[0]}, {kinds[1]}]:\n"
        f"        return self.{names[0]}, self.{names[1]}\n```"
    )


def sql(d: Draw) -> tuple[str, str]:
    """A query in SQL."""
    table_name = f"{d.pick(FIELDS)}_{d.thing().split()[1]}s"
    columns = d.several(lambda: d.pick(FIELDS), d.number(3, 4))
    low, limit, town = d.number(2, 98), d.number(2, 50), d.town()
    question = d.pick(
        (
            f"SQL: from {table_name}, the {_listed(columns[:-1])} where {columns[-1]} is over "
            f"{low} and the town is {town}, by {columns[0]}, at most {limit}.",
            f"Query {table_name} in SQL for {_listed(columns[:-1])}: {columns[-1]} above {low}, "
            f"town {town}, sorted by {columns[0]}, {limit} rows.",
        )
    )
    return question, (
        f"```sql\nSELECT {', '.join(columns[:-1])}\nFROM {table_name}\n"
        f"WHERE {columns[-1]} > {low} AND town = '{town}'\n"
        f"ORDER BY {columns[0]}\nLIMIT {limit};\n```"
    )


def letter(d: Draw) -> tuple[str, str]:
    """A short letter from notes."""
    to, sender, town, thing = d.name(), d.name(), d.town(), d.thing()
    day, time, price = d.pick(DAYS), _time(d), _price(d)
    question = d.pick(
        (
            f"Write a letter from {sender} to {to}: {thing} ready, {price}, {town}, {day} at "
            f"{time}.",
            f"{sender} wants to tell {to} that the {thing} is ready: {price}, {town}, {day}, "
            f"{time}. Write the letter.",
        )
    )
    thanks = d.pick(
        ("Thank you for your patience.", "I hope you like it.", "Please bring this letter.")
    )
    return question, (
        f"Dear {to},\n\nThe {thing} you asked for is ready. It costs {price}, and you can collect "
        f"it in {town} on {day} at {time}. {thanks}\n\n"
        f"{d.pick(('Yours', 'Kind regards', 'Best wishes'))},\n{sender}"
    )


def who_lives(d: Draw) -> tuple[str, str]:
    """Which of several people live in a town, one by one."""
    count = d.number(3, 6)
    names, towns = d.several(d.name, count), d.several(d.town, 2)
    homes = [d.pick(towns) for _ in names]
    if towns[0] not in homes:
        homes[0] = towns[0]
    words = "; ".join(f"{n}: {t}" for n, t in zip(names, homes, strict=True))
    question = d.pick((f"Who lives in {towns[0]}? {words}.", f"{words}. Who is from {towns[0]}?"))
    lines = "\n".join(
        f"- {n}: {t}, {'yes' if t == towns[0] else 'no'}" for n, t in zip(names, homes, strict=True)
    )
    found = [n for n, t in zip(names, homes, strict=True) if t == towns[0]]
    verb = "lives" if len(found) == 1 else "live"
    return question, f"{lines}\n\n{_listed(found)} {verb} in {towns[0]}."


def reverse(d: Draw) -> tuple[str, str]:
    """A list backwards."""
    make = d.pick((d.name, d.town, d.thing))
    things = d.several(make, d.number(4, 6))
    question = d.pick(
        (f"Reverse this list: {', '.join(things)}.", f"Say backwards: {', '.join(things)}.")
    )
    return question, f"Backwards it is {', '.join(reversed(things))}."


def settings(d: Draw) -> tuple[str, str]:
    """Settings in words as YAML."""
    service = d.thing().replace(" ", "-")
    host, port = d.town().lower(), d.number(1024, 9999)
    fields = d.several(lambda: d.pick(FIELDS), d.number(3, 5))
    values = [str(d.number(2, 999)) if d.number(0, 1) else d.name().lower() for _ in fields]
    words = _listed([f"{f} {v}" for f, v in zip(fields, values, strict=True)])
    question = d.pick(
        (
            f"Write YAML for the service {service} on {host}, port {port}, with {words}.",
            f"YAML, please: service {service}, host {host}, port {port}; {words}.",
        )
    )
    body = "\n".join(f"    {f}: {v}" for f, v in zip(fields, values, strict=True))
    return question, (
        f"```yaml\nservice:\n  name: {service}\n  address: {host}:{port}\n  options:\n{body}\n```"
    )


def route(d: Draw) -> tuple[str, str]:
    """A route with its legs and length."""
    towns = d.several(d.town, d.number(3, 5))
    legs = [d.number(2, 40) for _ in towns[1:]]
    words = ", ".join(f"{town} {km} km" for town, km in zip(towns[1:], legs, strict=True))
    question = d.pick(
        (
            f"How do I get from {towns[0]} to {towns[-1]}? Legs: {words}.",
            f"Describe the route from {towns[0]}: {words}.",
        )
    )
    text, so_far = f"Start in {towns[0]}.", 0
    for i, (town, km) in enumerate(zip(towns[1:], legs, strict=True)):
        so_far += km
        verb = "Go" if i == 0 else d.pick(("Then go", "Go on", "From there it is"))
        text += f"\n{verb} {km} km to {town}, {so_far} km in all."
    return question, f"{text}\nYou are in {towns[-1]} after {len(legs)} legs."


def story(d: Draw) -> tuple[str, str]:
    """A short story from a few words."""
    hero, friend, town, thing = d.name(), d.name(), d.town(), d.thing()
    animal, job, day = d.pick(ANIMALS), d.pick(JOBS), d.pick(DAYS)
    question = d.pick(
        (
            f"Tell a story: {hero} the {animal}, {friend} the {job}, {town}, a {thing}.",
            f"A story, please, about {hero} the {animal} and {friend} the {job} of {town}, with a "
            f"{thing}.",
        )
    )
    first = d.pick(
        (
            f"In {town} there lived a {animal} called {hero}.",
            f"Once upon a time a {animal} named {hero} came to {town}.",
        )
    )
    second = d.pick(
        (
            f"One {day} {hero} found a {thing} by the road.",
            f"On a {day} morning a {thing} lay at {hero}'s door.",
        )
    )
    third = d.pick(
        (
            f'"Whose is it?" asked the {animal}, and went to see {friend} the {job}.',
            f"Not knowing what to do with it, the {animal} asked {friend} the {job}.",
        )
    )
    fourth = d.pick(
        (
            f'"It is mine," said {friend}, "and I have looked for it all week."',
            f'{friend} laughed. "I lost that {thing} years ago!"',
        )
    )
    last = d.pick(
        (
            f"So the {thing} went home, and {hero} and {friend} were friends ever after.",
            f"From that day on {hero} helped the {job} every {day}.",
        )
    )
    return question, f"{first} {second}\n\n{third} {fourth}\n\n{last}"


FAMILIES: dict[str, Family] = {
    "order": order_json,
    "describe": describe,
    "table": table,
    "sort": sort,
    "add": add,
    "invoice": invoice,
    "class": dataclass_code,
    "sql": sql,
    "letter": letter,
    "who": who_lives,
    "reverse": reverse,
    "yaml": settings,
    "route": route,
    "story": story,
}


def conversations(seed: int, held_out: bool) -> Iterator[Conversation]:
    """Endless conversations; every family is as frequent as any other."""
    draw = Draw(seed, held_out)
    names = list(FAMILIES)
    while True:
        draw.rng.shuffle(names)
        for name in names:
            yield Conversation(name, *FAMILIES[name](draw))
