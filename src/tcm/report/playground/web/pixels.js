// Between the model's numbers in [-1, 1] and pixels on a canvas, on the screen or in a file.

const SAVED_WIDTH = 512;

/** clamp(127.5 x + 128, 0, 255), truncated, in float32 as torch computes it. */
export function toPixels(x) {
  return Uint8ClampedArray.from(x, (value) => {
    const scaled = Math.fround(Math.fround(value * 127.5) + 128);
    return Math.trunc(Math.min(Math.max(scaled, 0), 255));
  });
}

/** Draw pixels (channels, height, width) on a canvas of that size; `opaque(i)` says how opaque pixel i is. */
export function draw(canvas, pixels, [channels, height, width], opaque = () => 255) {
  const area = height * width;
  const image = new ImageData(width, height);
  for (let i = 0; i < area; i++) {
    for (let colour = 0; colour < 3; colour++) {
      image.data[4 * i + colour] = pixels[Math.min(colour, channels - 1) * area + i];
    }
    image.data[4 * i + 3] = opaque(i);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Give a canvas the size of the model's images. */
export function sized(canvas, [, height, width]) {
  canvas.width = width;
  canvas.height = height;
  canvas.style.aspectRatio = `${width} / ${height}`;
  return canvas;
}

/** Canvases side by side in `columns`, each pixel enlarged, a thin white line between images. */
export function sheetOf(canvases, columns) {
  const [{ width, height }] = canvases;
  const scale = Math.max(1, Math.floor(SAVED_WIDTH / (width * columns)));
  const gap = canvases.length > 1 ? scale : 0;
  const sheet = document.createElement("canvas");
  sheet.width = columns * (width * scale + gap) - gap;
  sheet.height = Math.ceil(canvases.length / columns) * (height * scale + gap) - gap;
  const context = sheet.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, sheet.width, sheet.height);
  context.imageSmoothingEnabled = false;
  canvases.forEach((canvas, i) => {
    const [left, top] = [(i % columns) * (width * scale + gap), Math.floor(i / columns) * (height * scale + gap)];
    context.drawImage(canvas, left, top, width * scale, height * scale);
  });
  return sheet;
}

/** Offer a canvas as a PNG to save. */
export function savePng(canvas, name) {
  canvas.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }, "image/png");
}
