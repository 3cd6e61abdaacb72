// Light or dark: as the system says, until the visitor chooses.

/** Make the button switch between the page's light and dark colours, which the style has under a media query. */
export function themeButton(button) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
  const dark = rules.find((rule) => rule.media?.mediaText.includes("prefers-color-scheme"));
  let chosen = null;

  function show() {
    const isDark = chosen ?? system.matches;
    dark.media.mediaText = isDark ? "screen" : "not all";
    document.documentElement.style.colorScheme = isDark ? "dark" : "light";
    button.textContent = isDark ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark ? "Use light colours" : "Use dark colours");
  }
  button.addEventListener("click", () => {
    chosen = !(chosen ?? system.matches);
    show();
  });
  system.addEventListener("change", show);
  show();
}
