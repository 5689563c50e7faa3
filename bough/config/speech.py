"""Facts of a Whisper checkpoint: special tokens, languages and decoding rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bough.config.fields import Fields
from bough.core.errors import ConfigError
from bough.core.speech import SpeechRules

ARCHITECTURE: Final = "WhisperForConditionalGeneration"
TIMESTAMP_S: Final = 0.02
"""Seconds between two timestamps: two frames of the spectrum."""
_NAMES: Final = """
en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese pt:portuguese tr:turkish
pl:polish ca:catalan nl:dutch ar:arabic sv:swedish it:italian id:indonesian hi:hindi fi:finnish vi:vietnamese
he:hebrew uk:ukrainian el:greek ms:malay cs:czech ro:romanian da:danish hu:hungarian ta:tamil no:norwegian
th:thai ur:urdu hr:croatian bg:bulgarian lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh sk:slovak
te:telugu fa:persian lv:latvian bn:bengali sr:serbian az:azerbaijani sl:slovenian kn:kannada et:estonian
mk:macedonian br:breton eu:basque is:icelandic hy:armenian ne:nepali mn:mongolian bs:bosnian kk:kazakh
sq:albanian sw:swahili gl:galician mr:marathi pa:punjabi si:sinhala km:khmer sn:shona yo:yoruba so:somali
af:afrikaans oc:occitan ka:georgian be:belarusian tg:tajik sd:sindhi gu:gujarati am:amharic yi:yiddish lo:lao
uz:uzbek fo:faroese ht:haitian_creole ps:pashto tk:turkmen nn:nynorsk mt:maltese sa:sanskrit lb:luxembourgish
my:myanmar bo:tibetan tl:tagalog mg:malagasy as:assamese tt:tatar haw:hawaiian ln:lingala ha:hausa ba:bashkir
jw:javanese su:sundanese yue:cantonese
"""
LANGUAGES: Final[Mapping[str, str]] = dict(each.replace("_", " ").split(":") for each in _NAMES.split())
"""Code -> name, of the languages that Whisper knows."""
_OTHER_NAMES: Final = """
my:burmese ca:valencian nl:flemish ht:haitian lb:letzeburgesch ps:pushto pa:panjabi ro:moldavian ro:moldovan
si:sinhalese es:castilian zh:mandarin
"""
OTHER_NAMES: Final[Mapping[str, str]] = {
    name.replace("_", " "): code for code, name in (each.split(":") for each in _OTHER_NAMES.split())
}
"""Further names -> code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechFacts:
    """Ids of Whisper's special tokens."""

    start: int
    """Begins a transcript."""
    end: int
    """Ends a transcript; ids of text tokens are smaller."""
    previous: int | None
    """Precedes the previous text in a prompt."""
    no_timestamps: int
    """Requests a transcript without timestamps. Timestamp tokens follow it in the vocabulary."""
    languages: Mapping[str, int]
    """Language code -> token. Empty: the model is English only, and has no task tokens either."""
    tasks: Mapping[str, int]
    suppress: tuple[int, ...]
    suppress_first: tuple[int, ...]
    most_initial: int
    """As `SpeechRules.most_initial`."""
    context: int
    """Tokens of a prompt and its answer together."""

    @property
    def no_speech(self) -> int:
        """The token that predicts silence."""
        return self.no_timestamps - 1

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    def rules(self, *, timestamps: bool) -> SpeechRules:
        return SpeechRules(
            end=self.end,
            first_timestamp=self.first_timestamp,
            timestamps=timestamps,
            most_initial=self.most_initial,
            suppress=self.suppress,
            suppress_first=self.suppress_first,
        )


def read_speech(
    config: Mapping[str, Any], generation: Mapping[str, Any], id_of: Callable[[str], int | None]
) -> SpeechFacts | None:
    """Reads a checkpoint's config and generation config; `id_of` looks up tokens that these files do not name. None: it
    is not a Whisper model. Raises `ConfigError` if a special token is missing."""
    fields = Fields(config)
    if fields.architecture() != ARCHITECTURE:
        return None

    def mark(name: str, text: str) -> int:
        given = generation.get(name, config.get(name))
        found = given if isinstance(given, int) and not isinstance(given, bool) else id_of(text)
        if found is None:
            raise ConfigError(
                what=f"the checkpoint does not say which token is {text}",
                why=f"neither generation_config.json ({name}) nor the tokenizer has it",
                fix="check its files",
            )
        return found

    def ids(name: str) -> tuple[int, ...]:
        given = generation.get(name, config.get(name))
        return tuple(each for each in given if each >= 0) if isinstance(given, list) else ()

    languages = {_code(text): each for text, each in dict(generation.get("lang_to_id") or {}).items()}
    multilingual = generation.get("is_multilingual", fields.count("vocab_size", default=51_865) != 51_864)
    if multilingual and not languages:
        found = {code: id_of(f"<|{code}|>") for code in LANGUAGES}
        languages = {code: each for code, each in found.items() if each is not None}
    tasks = dict(generation.get("task_to_id") or {})
    if languages:
        for task in ("transcribe", "translate"):
            if task not in tasks:
                tasks[task] = mark(f"{task}_token_id", f"<|{task}|>")
    initial = generation.get("max_initial_timestamp_index")
    return SpeechFacts(
        start=mark("decoder_start_token_id", "<|startoftranscript|>"),
        end=mark("eos_token_id", "<|endoftext|>"),
        previous=generation.get("prev_sot_token_id", id_of("<|startofprev|>")),
        no_timestamps=mark("no_timestamps_token_id", "<|notimestamps|>"),
        languages=languages if multilingual else {},
        tasks=tasks if multilingual else {},
        suppress=ids("suppress_tokens"),
        suppress_first=ids("begin_suppress_tokens"),
        most_initial=initial if isinstance(initial, int) else -1,
        context=fields.count("max_target_positions", default=448),
    )


def _code(text: str) -> str:
    return text.removeprefix("<|").removesuffix("|>")
