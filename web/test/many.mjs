// Many machines: the first load is small, the list has all of them at any place of it, and cuts no text.
import { check, enter, inspect, log, run, settings } from "./browser.mjs";

/** What the first load of 200 machines may take (contract row `web.first`). */
const FIRST_MAX = 300_000;

await run(async (browser) => {
  const begun = Date.now();
  const page = await enter(browser, settings.admin);
  await page.getByText(`${settings.machines.toLocaleString("en-GB")} machines`).waitFor();
  await page.getByRole("link", { name: "web", exact: true }).waitFor();
  const bytes = await page.evaluate(() =>
    [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")].reduce(
      (sum, entry) => sum + entry.transferSize,
      0,
    ),
  );
  log(`${settings.machines} machines: ${bytes} bytes, ${Date.now() - begun} ms`);
  if (settings.machines <= 200) check(bytes < FIRST_MAX, `the first load has ${bytes} bytes`);
  await inspect(page, "a long list");

  const table = page.getByRole("table", { name: "Machines" });
  const rows = Number(await table.getAttribute("aria-rowcount"));
  check(rows === settings.machines + 1, `the table says that it has ${rows} rows`);
  const seen = new Set();
  for (let end = false; !end; ) {
    const names = await table.locator("tbody tr:not(.space) a").allInnerTexts();
    names.forEach((name) => seen.add(name));
    const cut = await table.evaluate(
      (element) =>
        [...element.querySelectorAll("tr:not(.space) td")].filter(
          (cell) => cell.scrollWidth > cell.clientWidth + 1,
        ).length,
    );
    check(cut === 0, `${cut} cells are cut`);
    end = await page.evaluate(() => scrollY + innerHeight >= document.documentElement.scrollHeight - 1);
    await page.evaluate(() => scrollBy(0, innerHeight));
    // Nothing of what is in sight is left out: the rows there have been drawn.
    await page.waitForFunction(() =>
      [...document.querySelectorAll("tr.space")].every((row) => {
        const { top, bottom } = row.getBoundingClientRect();
        return bottom <= 0 || top >= innerHeight;
      }),
    );
  }
  check(seen.size === settings.machines, `${seen.size} machines are shown`);

  await page.getByLabel("Filter machines").fill(`web-${settings.machines - 1}`);
  await page.getByRole("link", { name: `web-${settings.machines - 1}`, exact: true }).click();
  await page.getByRole("heading", { level: 1, name: `web-${settings.machines - 1}` }).waitFor();
});
