# ruff: noqa: RUF001
"""Texts of many kinds, made from a seed: what tokenizers are compared on."""

import unicodedata

import numpy as np

WORDS = {
    "latin": "the cat sat on a mat I'm you're they'll she'd we've DON'T it'S O'Neil e-mail naïve",
    "german": "Zürich grüßt Straße Öl übermäßig Fuß Äpfel",
    "accents": "café déjà vu Ångström piñata façade Đorđe İstanbul ıslak ﬁancée ﬀ",
    "vietnamese": "Tiếng Việt ngày nghĩa đường phở",
    "greek": "Καλημέρα κόσμε ἀρχή ὦ",
    "cyrillic": "Привет мир ёлка йод Україна їжак",
    "arabic": "مرحبا بالعالم كِتَابٌ ٢٠٢٤ ﷺ",
    "hebrew": "שלום עולם שָׁלוֹם",
    "hindi": "नमस्ते दुनिया क़लम १२३ क्षत्रिय",
    "thai": "สวัสดีชาวโลก กำลัง น้ำ ๑๒๓",
    "chinese": "你好世界 中文，分词。 「引号」 二〇二四年",
    "japanese": "こんにちは 世界 カタカナ ｶﾞ が ガ 第１２回",
    "korean": "안녕하세요 세계 한국어 각 각",
    "georgian": "გამარჯობა ქართული",
    "amharic": "ሰላም ልዑል",
    "emoji": "😀 👩\u200d👩\u200d👧\u200d👦 👍🏽 🏳️\u200d🌈 🇩🇪🇫🇷 ❤️ 1️⃣ ☺",
    "symbols": "½ ² ³ Ⅷ ① ㎏ € £ ± ∑ → ≠ ▁ ▁▁ █ © ™ … – — “quoted” ‘it’s’ «x»",
    "numbers": "0 7 42 2024 3,500.75 1_000_000 1e-9 0xFF 12:30:59 2024-02-29 +49-170-12345678 3/4",
    "code": "def f(x): return x**2 #c ; {\"a\":[1,null]} <div class='x'> </div> $HOME && ||= ->=>",
    "controls": "a\x00b \x07 \x1b[0m \u200b \u00ad \u2028 \ufeff \u0085 \u00a0 \u3000 \ufffd",
    "rare": "𝔘𝔫𝔦 𐍈 𓀀 \U000e0041 \ue000 𝟙𝟚 ꙮ Z̸̢a̷̛l̶̀g̵o",
}
SPACES = (" ", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n", "\n  ", "\u00a0", "")
RUNS = (
    " ",
    "\n",
    "\t",
    "\r\n",
    " \t",
    "\n ",
    "▁",
    "a",
    "ab",
    "=",
    "-",
    "0",
    "é",
    "的",
    ".",
    "\u3000",
)


def varied_texts(count: int = 2000, special: tuple[str, ...] = (), seed: int = 0) -> list[str]:
    """`count` different texts; about one in five holds some of the `special` tokens."""
    random = np.random.default_rng(seed)
    words = [text.split(" ") for text in WORDS.values()]
    texts: dict[str, None] = dict.fromkeys(("", " ", "  ", "\n", "a", " a", "a ", *special))

    def pick(values):
        return values[random.integers(len(values))]

    def piece() -> str:
        kind = random.random()
        if kind < 0.12:
            return pick(RUNS) * int(random.integers(1, 40))
        if kind < 0.24:
            return str(random.integers(10 ** int(random.integers(1, 12))))
        if kind < 0.30:
            return "".join(chr(c) for c in random.integers(32, 127, random.integers(1, 12)))
        if kind < 0.34:
            codes = random.integers(0x80, 0x2FFFF, random.integers(1, 4))
            return "".join(chr(c) for c in codes if not 0xD800 <= c < 0xE000)
        if kind < 0.38:
            return chr(random.integers(ord("a"), 0x250)) + chr(random.integers(0x300, 0x330))
        return pick(pick(words))

    while len(texts) < count:
        language, parts = pick(words), []
        specials = random.random() < 0.2 and special
        for _ in range(random.integers(1, 14)):
            word = pick(language) if random.random() < 0.5 else piece()
            parts.append(pick(special) if specials and random.random() < 0.3 else word)
            parts.append(pick(SPACES))
        text = "".join(parts[: len(parts) - random.integers(2)])
        form = random.random()
        if form < 0.3:
            text = unicodedata.normalize("NFC" if form < 0.1 else "NFD", text)
        elif form < 0.4:
            text = text.upper() if form < 0.35 else text.title()
        texts[text] = None
    return list(texts)
