import io

from PIL import Image, ImageDraw, ImageFilter

image = Image.new("RGB", (64, 64), "white")
ImageDraw.Draw(image).ellipse((8, 8, 56, 56), fill="red")
data = io.BytesIO()
image.filter(ImageFilter.BLUR).save(data, "JPEG")
assert Image.open(io.BytesIO(data.getvalue())).size == (64, 64)
print("ok pillow_image")
