"""Pictures of results, for PNG, SVG, PDF and web pages that open offline; needs the extra `plot`.

from esm_turbo.pictures import draw

draw(turbo.score_variants(protein)).save("map.html")
"""

from esm_turbo.pictures.picture import Picture, draw

__all__ = ["Picture", "draw"]
