// Draw your own: what is painted is known, the rest is the model's, and the model answers while you paint.

import { byId, byIds } from "./dom.js";
import { latestOnly } from "./pacing.js";
import { draw, savePng, sheetOf, sized, toPixels } from "./pixels.js";
import { completion } from "./sampling.js";
import { classRows } from "./settings.js";
import { timeSlider } from "./timescale.js";

export function drawingPart(model, f, store, chosen) {
  const [yours, noisy, made] = ["yours", "noisy", "made"].map((id) => sized(byId(id), model.shape));
  const easel = newEasel(model);
  let t = model.drawingTime;

  const complete = latestOnly(async () => {
    draw(yours, toPixels(easel.picture), model.shape, (i) => (easel.known[i] ? 255 : 0));
    const settings = store.get();
    const seed = settings.seed + settings.image;
    const classes = classRows(model, settings.mix, [seed]);
    const answer = await completion(f, { ...easel, seed, t, tMax: model.tMax, classes });
    const scale = 1 / Math.sqrt(1 + t * t);
    draw(noisy, toPixels(answer.given.map((value) => value * scale)), model.shape);
    draw(made, toPixels(answer.made), model.shape);
  });

  const tools = toolsOf(model);
  painting(yours, model, (x, y, erasing) => {
    easel.paint(x, y, tools.radius(), erasing || tools.erasing() ? null : tools.colour());
    complete();
  });
  timeSlider(
    byId("drawing-time"),
    byId("drawing-time-shown"),
    { low: model.tMin, high: model.tMax, value: t, label: "t" },
    (time) => {
      t = time;
      complete();
    },
  );
  const actions = {
    clear: easel.clear,
    "from-sample": () => easel.take(chosen(), 1),
    "from-half": () => easel.take(chosen(), 0.5),
  };
  for (const [id, action] of Object.entries(actions)) {
    byId(id).addEventListener("click", () => {
      action();
      complete();
    });
  }
  byId("save-made").addEventListener("click", () => {
    savePng(sheetOf([made], 1), `${model.file}-drawn.png`);
  });
  store.onChange(() => complete());
  return {
    begin() {
      easel.take(chosen(), 0.5);
      return complete();
    },
  };
}

/** The picture, in the model's numbers, and where it is known. */
function newEasel(model) {
  const [channels, height, width] = model.shape;
  const area = height * width;
  const picture = new Float32Array(model.size);
  const known = new Uint8Array(model.size);

  function set(i, colour) {
    for (let channel = 0; channel < channels; channel++) {
      known[channel * area + i] = colour ? 1 : 0;
      picture[channel * area + i] = colour ? colour[channel] / 127.5 - 1 : 0;
    }
  }

  return {
    picture,
    known,
    clear: () => known.fill(0) && picture.fill(0),
    /** A disc in pixels; no colour erases. */
    paint(x, y, radius, colour) {
      for (let row = 0; row < height; row++) {
        for (let column = 0; column < width; column++) {
          const centre = row === Math.floor(y) && column === Math.floor(x);
          if (centre || Math.hypot(column + 0.5 - x, row + 0.5 - y) < radius) set(row * width + column, colour);
        }
      }
    },
    /** The upper part of an image's pixels; the rest is left to the model. */
    take(pixels, part) {
      if (!pixels) return;
      const colourOf = (i) => Array.from({ length: channels }, (_, channel) => pixels[channel * area + i]);
      for (let i = 0; i < area; i++) set(i, i < part * area ? colourOf(i) : null);
    },
  };
}

/** The brush as the visitor has set it. */
function toolsOf(model) {
  const [brush, shade, colour] = byIds("brush", "shade", "colour");
  const grey = model.shape[0] === 1;
  (grey ? shade : colour).closest("label").hidden = false;
  brush.max = Math.max(2, Math.round(model.shape[2] / 4));
  brush.value = Math.max(1, Math.round(model.shape[2] / 12));
  return {
    radius: () => Number(brush.value) - 0.4, // 1 is a single pixel, 2 are nine
    erasing: () => byId("erase").checked,
    colour: () => (grey ? [Number(shade.value)] : [1, 3, 5].map((i) => parseInt(colour.value.slice(i, i + 2), 16))),
  };
}

/** Call `paint(x, y, erasing)` in pixels of the image, for pointers (the right button erases) and for keys. */
function painting(canvas, model, paint) {
  const [, height, width] = model.shape;
  const cursor = byId("cursor");
  const at = { x: Math.floor(width / 2), y: Math.floor(height / 2) };

  let before = null;

  /** From where the pointer was to where it is, without gaps. */
  function stroke(event) {
    const box = canvas.getBoundingClientRect();
    const point = [((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * height) / box.height];
    const [x, y] = before ?? point;
    const parts = Math.ceil(2 * Math.hypot(point[0] - x, point[1] - y)) || 1;
    for (let i = 1; i <= parts; i++) {
      paint(x + ((point[0] - x) * i) / parts, y + ((point[1] - y) * i) / parts, event.buttons === 2);
    }
    before = point;
  }
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    before = null;
    stroke(event);
  });
  canvas.addEventListener("pointermove", (event) => event.buttons && stroke(event));
  canvas.addEventListener("contextmenu", (event) => event.preventDefault());

  function showCursor() {
    Object.assign(cursor.style, {
      left: `${(100 * at.x) / width}%`,
      top: `${(100 * at.y) / height}%`,
      width: `${100 / width}%`,
      height: `${100 / height}%`,
    });
  }
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const [dx, dy] = moves[event.key] ?? [0, 0];
    if (event.key === " ") paint(at.x + 0.5, at.y + 0.5, false);
    else if (event.key === "Delete" || event.key === "Backspace") paint(at.x + 0.5, at.y + 0.5, true);
    else if (!moves[event.key]) return;
    event.preventDefault();
    at.x = Math.min(Math.max(at.x + dx, 0), width - 1);
    at.y = Math.min(Math.max(at.y + dy, 0), height - 1);
    showCursor();
  });
  showCursor();
}
