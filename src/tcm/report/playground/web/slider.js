// From one noise to another: a slider, the images along the way, and a film.

import { byId, byIds } from "./dom.js";
import { between, normal } from "./noise.js";
import { frameCounter, latestOnly } from "./pacing.js";
import { draw, sized, toPixels } from "./pixels.js";
import { consistencySteps } from "./sampling.js";
import { classRows, isSeed, timesOf } from "./settings.js";

const STOPS = 9;
const SECONDS_ONE_WAY = 4;

export function sliderPart(model, f, store) {
  const [canvas, slider, play, rate, strip] = byIds("way", "position", "play", "rate", "strip");
  const ends = byIds("from", "to");
  sized(canvas, model.shape);
  const stops = Array.from({ length: STOPS }, () => sized(document.createElement("canvas"), model.shape));
  strip.append(...stops);
  const counted = frameCounter();
  let playing = false;

  /** Pixels of the images at some positions between the two noises, from 0 to 1. */
  async function imagesAt(positions) {
    const seeds = ends.map((end) => Number(end.value));
    const noises = timesOf(model, store.get()).map((_, step) => seeds.map((seed) => normal(seed, step, model.size)));
    const along = noises.map(([from, to]) => noisesAlong(from, to, positions));
    const classes = classesAlong(model, store.get().mix, seeds, positions);
    return toPixels(await consistencySteps(f, timesOf(model, store.get()), (step) => along[step], classes));
  }

  const show = latestOnly(async () => {
    const pixels = await imagesAt([slider.value / slider.max]);
    draw(canvas, pixels, model.shape);
    const frames = counted();
    if (playing && frames) rate.textContent = `${Math.round(frames)} frames/s`;
  });

  const showStrip = latestOnly(async () => {
    const pixels = await imagesAt(stops.map((_, i) => i / (STOPS - 1)));
    stops.forEach((stop, i) => draw(stop, pixels.subarray(i * model.size, (i + 1) * model.size), model.shape));
  });

  async function film(start, from) {
    if (!playing) return;
    const way = from + (performance.now() - start) / 1000 / SECONDS_ONE_WAY;
    const position = Math.abs(((way + 1) % 2) - 1);
    slider.value = Math.round(position * slider.max);
    await show();
    requestAnimationFrame(() => film(start, from));
  }

  function setPlaying(wanted) {
    playing = wanted;
    play.textContent = playing ? "Pause" : "Play";
    rate.textContent = "";
    if (playing) film(performance.now(), slider.value / slider.max);
  }

  slider.addEventListener("input", () => {
    if (playing) setPlaying(false);
    show();
  });
  play.addEventListener("click", () => setPlaying(!playing));
  stops.forEach((stop, i) =>
    stop.addEventListener("click", () => {
      slider.value = Math.round((i / (STOPS - 1)) * slider.max);
      slider.dispatchEvent(new Event("input"));
    }),
  );

  function showAll() {
    return Promise.all([show(), showStrip()]);
  }
  ends.forEach((end) =>
    end.addEventListener("change", () => {
      if (!isSeed(Number(end.value)) || end.value === "") end.value = end.defaultValue;
      showAll();
    }),
  );
  byId("other-ends").addEventListener("click", () => {
    ends.forEach((end) => (end.value = Math.floor(Math.random() * 100_000)));
    showAll();
  });
  store.onChange((changed) => changed.some((name) => ["mix", "steps", "second"].includes(name)) && showAll());
  return { showAll, toggle: () => play.click() };
}

/** The noises at some positions between two, one after the other. */
function noisesAlong(from, to, positions) {
  const noises = new Float32Array(positions.length * from.length);
  positions.forEach((position, i) => noises.set(between(from, to, position), i * from.length));
  return noises;
}

/** The class weights at each position: those chosen; else from the class of one seed to that of the other. */
function classesAlong(model, mix, seeds, positions) {
  const ends = classRows(model, mix, seeds);
  if (ends === null) return null;
  const width = model.classes.length;
  const rows = new Float32Array(positions.length * width);
  positions.forEach((position, row) => {
    for (let i = 0; i < width; i++) rows[row * width + i] = (1 - position) * ends[i] + position * ends[width + i];
  });
  return rows;
}
