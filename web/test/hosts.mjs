// The page of several hosts: what each has, a machine of another host that is looked at, typed to and paused, and
// a host that does not answer.
import { check, enter, expectProblems, go, inspect, picture, run, settings } from "./browser.mjs";

async function refusesStrangers(browser) {
  const context = await browser.newContext();
  const ask = async (path, password) => {
    const headers = password ? { authorization: `Bearer ${password}` } : {};
    return (await context.request.get(`${settings.url}${path}`, { headers })).status();
  };
  for (const password of [undefined, "wrong", `${settings.password}x`]) {
    for (const path of ["hosts", "hosts/beta/v1/machines", "hosts/nowhere/v1/machines"]) {
      check((await ask(path, password)) === 401, `${path} with ${password}`);
    }
  }
  check((await ask("hosts/beta/v1/machines", settings.password)) === 200, "beta does not answer");
  check((await ask("hosts/nowhere/v1/machines", settings.password)) === 404, "a host that is not there");
  check((await ask("hosts/beta/metrics", settings.password)) === 404, "more than the API is passed on");
  check((await ask("hosts/gone/v1/machines", settings.password)) === 502, "a host that is gone answers");
  check((await ask("hosts/stale/v1/machines", settings.password)) === 403, "a token that no host knows");
  await context.close();
}

async function typesIntoTheConsole(page) {
  await go(page, "machines/far/console");
  const terminal = page.getByRole("region", { name: "Serial console of far" });
  await terminal.locator(".xterm-screen").waitFor();
  const answered = terminal.locator(".xterm-rows").getByText("whimbrel! browser");
  for (let turn = 0; turn < 60 && (await answered.count()) === 0; turn++) {
    // On a busy host the page may have taken the keyboard back meanwhile.
    await terminal.locator(".xterm-screen").click();
    await page.keyboard.type("whimbrel? browser ping\n");
    await page.waitForTimeout(500);
  }
  check((await answered.count()) > 0, `the guest does not answer: ${await terminal.innerText()}`);
}

await run(async (browser) => {
  await refusesStrangers(browser);
  for (const [look, options] of Object.entries({
    light: {},
    phone: { viewport: { width: 390, height: 780 }, colorScheme: "dark" },
  })) {
    const page = await enter(browser, settings.password, { label: "Password", ...options });
    await go(page, "hosts");
    const hosts = page.getByRole("table", { name: "Hosts", exact: true });
    await hosts.getByRole("row").filter({ hasText: "beta" }).getByText("1 of 1").waitFor();
    await hosts.getByRole("row").filter({ hasText: "local" }).getByText("0 of 0").waitFor();
    await page.getByRole("alert").filter({ hasText: "gone: " }).waitFor();
    await inspect(page, `all hosts, ${look}`);
    await picture(page, `hosts-${look}`);
    await page.context().close();
  }

  const page = await enter(browser, settings.password, { label: "Password" });
  const shown = page.getByRole("combobox", { name: "Host", exact: true });
  check((await shown.inputValue()) === "local", "another host than the first is shown");
  await go(page, "hosts");
  const machines = page.getByRole("table", { name: "Machines of all hosts" });
  await machines.getByRole("button", { name: "far", exact: true }).click();
  await page.getByRole("heading", { level: 1, name: "far" }).waitFor();
  check((await shown.inputValue()) === "beta", "the host is not that of the machine");
  await page.getByRole("button", { name: "Pause", exact: true }).click();
  const state = page.getByRole("heading", { level: 1 }).locator("..");
  await state.getByText("paused", { exact: true }).waitFor();
  await page.getByRole("button", { name: "Continue", exact: true }).click();
  await state.getByText("running", { exact: true }).waitFor();
  await page.getByRole("button", { name: "Checkpoint" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Tag", { exact: true }).fill("from-afar");
  await dialog.getByRole("button", { name: "Checkpoint", exact: true }).click();
  await page.getByText("Checkpoint far: done").waitFor();
  await typesIntoTheConsole(page);

  // A host that does not answer is not shown; the one of before stays, also when the page is loaded anew.
  await shown.selectOption("gone");
  await page
    .getByRole("status")
    .getByText(/^gone: /)
    .waitFor();
  check((await shown.inputValue()) === "beta", "a host that does not answer is shown");
  await page.reload();
  await shown.waitFor();
  check((await shown.inputValue()) === "beta", "the host is forgotten");
  await shown.selectOption("local");
  await page.getByText("There is no machine yet.").waitFor();
  await page.context().close();
  expectProblems("502 (Bad Gateway)");
  expectProblems("403 (Forbidden)");
});
