"""How models and data sets of the Hugging Face hub are named."""

import re

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def advice(name: str) -> str:
    """What to add to a message that there is no local `name`, where the hub may have been meant."""
    address = re.match(r"https?://huggingface\.co/(?:datasets/)?([\w.-]+/[\w.-]+)", name)
    if address:
        return f"; of an address on the hub give the id alone: {address[1]}"
    if re.fullmatch(r"[\w.-]+", name) and "." not in name.strip("."):
        return "; on the hub names have the form org/name"
    return ""
