() => {
  const query = () => document.querySelector("#query input, #query textarea");
  const tab = (name) => document.querySelector(`#tabs [role=tab][data-tab-id=${name}]`);
  const typing = (element) => element && element.matches("input:not([type=radio]), textarea, [contenteditable]");

  // "/" goes to the query from anywhere but a field, also from another tab.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || typing(document.activeElement)) return;
    event.preventDefault();
    tab("pictures").click();
    requestAnimationFrame(() => { query().focus(); query().select(); });
  });

  // The arrow keys go from tab to tab, as in every list of tabs.
  document.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const tabs = [...document.querySelectorAll("#tabs [role=tab]")], at = tabs.indexOf(document.activeElement);
    if (!step || at < 0) return;
    const next = tabs[(at + step + tabs.length) % tabs.length];
    next.click();
    next.focus();
  });

  // A pasted picture goes into the field of the tab, as if it had been chosen there.
  document.addEventListener("paste", (event) => {
    const picture = [...event.clipboardData.files].find((file) => file.type.startsWith("image/"));
    if (!picture) return;
    event.preventDefault();
    if (tab("pictures").ariaSelected === "true") tab("captions").click();
    const put = (frames) => {  // a tab that was never open has its field only some frames later
      const name = tab("classify").ariaSelected === "true" ? "classify-picture" : "caption-picture";
      const field = document.querySelector(`#${name} input[type=file]`), files = new DataTransfer();
      if (!field) return frames && requestAnimationFrame(() => put(frames - 1));
      files.items.add(picture);
      field.files = files.files;
      field.dispatchEvent(new Event("change", { bubbles: true }));
    };
    requestAnimationFrame(() => put(300));
  });

  // On a phone, focus would open the keyboard over the page.
  if (matchMedia("(pointer: fine)").matches) query()?.focus();
}
