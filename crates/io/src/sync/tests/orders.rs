//! Tests of threads, in the orders that happen to occur, or in orders that shuttle chooses.

/// The number of runs of `test` if the system chooses the order.
#[cfg(not(shuttle))]
const TRIES: usize = 50;

/// Runs `test` in many orders of its threads.
#[cfg(not(shuttle))]
pub(crate) fn in_every_order(test: impl Fn() + Send + Sync + 'static) {
    for _ in 0..TRIES {
        test();
    }
}

/// Run `test` in as many orders of its threads as `INGOT_ORDERS` says. Half of them switch threads at random; the others switch
/// at three points only, which finds faults that need one thread to pause for long.
#[cfg(shuttle)]
pub(crate) fn in_every_order(test: impl Fn() + Send + Sync + 'static) {
    let orders = std::env::var("INGOT_ORDERS").map_or(1000, |orders| orders.parse().unwrap());
    let test = std::sync::Arc::new(test);
    let mut noted = Noted { orders, wrong: 1 };
    let evenly = std::sync::Arc::clone(&test);
    shuttle::check_random(move || evenly(), orders / 2);
    shuttle::check_pct(move || test(), orders - orders / 2, 3);
    noted.wrong = 0;
}

/// Adds a line to the record of `make proof` when a test ends, well or not.
#[cfg(shuttle)]
struct Noted {
    orders: usize,
    wrong: usize,
}

#[cfg(shuttle)]
impl Drop for Noted {
    fn drop(&mut self) {
        let Some(path) = std::env::var_os("INGOT_RECORD") else {
            return;
        };
        let Noted { orders, wrong } = self;
        let line = format!("{{\"what\": \"threads, orders\", \"count\": {orders}, \"wrong\": {wrong}}}\n");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        std::io::Write::write_all(&mut file.unwrap(), line.as_bytes()).unwrap();
    }
}
