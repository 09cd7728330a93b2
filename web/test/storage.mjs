// Sessions and pools, with a real mount and a real pool behind them: what each shows, and when one is gone.
import { check, enter, go, inspect, picture, run, settings } from "./browser.mjs";

await run(async (browser) => {
  for (const [look, options] of Object.entries({
    light: {},
    phone: { viewport: { width: 390, height: 780 }, colorScheme: "dark" },
  })) {
    const page = await enter(browser, settings.admin, options);
    await go(page, "sessions");
    const session = page.getByRole("region", { name: "work" });
    await session.getByText("connected", { exact: true }).first().waitFor();
    await session.getByText(/^\d+ KiB in 1 file/).waitFor();
    await session.getByText(settings.mount, { exact: true }).waitFor();
    await inspect(page, `sessions, ${look}`);
    await picture(page, `sessions-${look}`);

    await go(page, "pools");
    const pool = page.getByRole("region", { name: "Pool of 127.0.0.1:7500" });
    await pool.getByText("all copies there").waitFor();
    const row = pool.getByRole("row").filter({ hasText: "b1" });
    await row.getByText("online").waitFor();
    await pool.getByText(/GiB free$/).waitFor();
    check((await pool.getByText(settings.key).count()) === 0, "the name of a pool has its key in it");
    await inspect(page, `pools, ${look}`);
    await picture(page, `pools-${look}`);
    // A pool that does not answer is there, and says so.
    await page.getByRole("region", { name: "Pool of 127.0.0.1:7599" }).getByRole("alert").waitFor();
    await page.context().close();
  }
});
