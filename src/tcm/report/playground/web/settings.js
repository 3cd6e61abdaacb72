// What the visitor has chosen, kept in the page's address, so that a link shows the same picture.

import { classOf } from "./noise.js";

/** The settings that an address holds; what it does not say, or says wrongly, is the model's default. */
export function readSettings(model, hash) {
  const given = new URLSearchParams(hash.slice(1));
  const seed = Number(given.get("seed") ?? 0);
  const image = Number(given.get("image") ?? 0);
  const second = Number(given.get("t2") ?? model.secondTime);
  return {
    seed: isSeed(seed) ? seed : 0,
    mix: readMix(model, given.get("class") ?? ""),
    steps: given.get("steps") === "2" ? 2 : 1,
    second: second >= model.tMin && second < model.tMax ? second : model.secondTime,
    image: Number.isInteger(image) && image >= 0 && image < model.grid ? image : 0,
  };
}

/** The address of the settings: the part after the page's own. */
export function writeSettings({ seed, mix, steps, second, image }) {
  const parts = [`seed=${seed}`];
  const classes = [...mix].map(([index, weight]) => (mix.size > 1 ? `${index}*${weight}` : index));
  if (mix.size) parts.push(`class=${classes.join("+")}`);
  parts.push(`steps=${steps}`);
  if (steps === 2) parts.push(`t2=${second}`);
  if (image) parts.push(`image=${image}`);
  return `#${parts.join("&")}`;
}

export function isSeed(seed) {
  return Number.isSafeInteger(seed) && seed >= 0 && Number.isSafeInteger(seed + 10_000);
}

/** Such as `3`, or `3*60+8*40`: a mix as a map from the class's number to its weight. (A `+` arrives as a space.) */
function readMix(model, text) {
  const pairs = text
    .split(/[ +]/)
    .filter((part) => part !== "")
    .map((part) => part.split("*").map(Number))
    .map(([index, weight = 100]) => [index, weight])
    .filter(([index, weight]) => Number.isInteger(index) && index >= 0 && index < model.classes.length && weight > 0);
  return new Map(pairs);
}

/** The times of the sampler's steps. */
export function timesOf(model, { steps, second }) {
  return steps === 2 ? [model.tMax, second] : [model.tMax];
}

/** What the network is given for some seeds: a row of class weights for each, of sum 1; null without classes. */
export function classRows(model, mix, seeds) {
  const width = model.classes.length;
  if (width === 0) return null;
  const rows = new Float32Array(seeds.length * width);
  const sum = [...mix.values()].reduce((total, weight) => total + weight, 0);
  seeds.forEach((seed, row) => {
    if (mix.size) mix.forEach((weight, index) => (rows[row * width + index] = weight / sum));
    else rows[row * width + classOf(seed, width)] = 1;
  });
  return rows;
}

/** The class of a seed in words. */
export function className(model, mix, seed) {
  if (model.classes.length === 0) return "";
  if (mix.size === 0) return model.classes[classOf(seed, model.classes.length)];
  const sum = [...mix.values()].reduce((total, weight) => total + weight, 0);
  const parts = [...mix].map(([index, weight]) => [model.classes[index], Math.round((100 * weight) / sum)]);
  return parts.map(([name, share]) => (mix.size > 1 ? `${share} % ${name}` : name)).join(", ");
}

/** Settings that tell those who listen what has changed. */
export function settingsStore(initial) {
  const listeners = [];
  let current = initial;
  return {
    get: () => current,
    onChange: (listener) => listeners.push(listener),
    set(changes) {
      current = { ...current, ...changes };
      listeners.forEach((listener) => listener(Object.keys(changes)));
    },
  };
}
