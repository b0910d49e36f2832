"""Module paths: those of a text model, whatever class the checkpoint or adapter was made for."""

_VISION_CLASS = "model.language_model."


def text_path(module: str) -> str:
    """`model.layers.0.mlp.up_proj` for that, and for its name in a class with a vision part."""
    if module.startswith(_VISION_CLASS):
        return "model." + module.removeprefix(_VISION_CLASS)
    return module
