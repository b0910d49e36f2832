"""Module paths: those of a text model, whatever class the checkpoint or adapter was made for."""


def text_path(name: str) -> str:
    """`model.layers.0.mlp.up_proj` for that, and for its names in classes with a vision part.

    Those put their text model one level deeper, `model.language_model.` or
    `language_model.model.`, the head too in the latter.
    """
    name = name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name
