// Sliders for times, which are even in ln t.

const POSITIONS = 200;

/** Make a slider choose a time from `low` to `high`; `onChange` is given the time, rounded to three digits. */
export function timeSlider(slider, shown, { low, high, value, label }, onChange) {
  slider.min = 0;
  slider.max = POSITIONS;
  slider.step = 1;

  function show(time) {
    slider.value = Math.round((POSITIONS * Math.log(time / low)) / Math.log(high / low));
    slider.setAttribute("aria-valuetext", `${label} ${time}`);
    shown.textContent = time;
  }

  slider.addEventListener("input", () => {
    const exact = low * (high / low) ** (slider.value / POSITIONS);
    const time = Math.min(Math.max(Number(exact.toPrecision(3)), low), high);
    shown.textContent = time;
    slider.setAttribute("aria-valuetext", `${label} ${time}`);
    onChange(time);
  });
  show(value);
  return show;
}
