//! The engines of a seed: their shapes, layouts and pools, and how slow everything is.

use super::SimOptions;
use super::agent::Agent;
use super::geometry::{Geometry, ix};
use super::report::Log;
use super::world::{Delays, Engine, Parts, World};
use kvxfer_fabric::sim::{SimConfig, SimNet, SplitMix64};
use kvxfer_proto::node::Config;
use kvxfer_proto::{DType, Incarnation, Kind, LayoutError, Order, PageLayout, Shard, Side};
use std::time::Duration;

/// Tokens of a room, at most.
pub(super) const MAX_TOKENS: u64 = 48;

/// One engine: tensor-parallel and pipeline-parallel size.
type Size = (u32, u32);

/// What a whole net looks like.
pub(super) struct Plan {
    pub(super) prefill: (Vec<PageLayout>, Vec<Size>),
    pub(super) decode: (Vec<PageLayout>, Vec<Size>),
    /// Pages of each group, of each rank.
    pub(super) pages: u32,
    pub(super) delays: Delays,
    pub(super) net: SimConfig,
    pub(super) config: Config,
    /// Bytes of a staging slot, and slots, of every agent.
    pub(super) staging: Option<(u64, u32)>,
}

/// Production's settings with every time divided by 50: rooms here take milliseconds, and faults must not outlast the run.
pub(super) fn config(options: &SimOptions) -> Config {
    let rooms = ix(u64::from(options.rooms));
    Config {
        heartbeat: Duration::from_millis(20),
        suspect_after: Duration::from_millis(100),
        fence_after: Duration::from_millis(200),
        drain_timeout: Duration::from_millis(600),
        forget_after: Duration::from_secs(5),
        bootstrap_timeout: Duration::from_secs(3),
        waiting_timeout: Duration::from_secs(3),
        tombstones: 65_536.max(2 * rooms),
        flaw: options.flaw,
        ..Config::default()
    }
}

fn pick<T: Copy>(rng: &mut SplitMix64, from: &[T]) -> T {
    from[ix(rng.between(0, from.len() as u64 - 1))]
}

impl Plan {
    fn draw(options: &SimOptions, rng: &mut SplitMix64) -> Self {
        let heads = pick(rng, &[2, 4]);
        let latent = rng.between(0, 2) == 0;
        let side = |rng: &mut SplitMix64| {
            let base = PageLayout {
                layers: 4,
                kv_heads: heads,
                head_dim: 2,
                page_tokens: pick(rng, &[4, 8]),
                dtype: DType::Uint8,
                order: pick(rng, &[Order::Hnd, Order::Nhd]),
                kind: pick(rng, &[Kind::Kv, Kind::Fused]),
                ..PageLayout::PLAIN
            };
            let mut groups = vec![base];
            if latent {
                let page_tokens = pick(rng, &[4, 8]);
                groups.push(PageLayout { kind: Kind::Latent, head_dim: 4, page_tokens, ..base });
            }
            groups
        };
        let sizes = |rng: &mut SplitMix64, from: &[Size], most: u64| {
            let n = rng.between(1, most);
            (0..n).map(|_| pick(rng, from)).collect::<Vec<_>>()
        };
        let (prefill, decode) = (side(rng), side(rng));
        let prefills = sizes(rng, &[(1, 1), (2, 1), (2, 1), (4, 1), (1, 2), (2, 2)], 2);
        let decodes = sizes(rng, &[(1, 1), (1, 1), (2, 1), (2, 1), (4, 1), (1, 2)], 3);
        // Enough that rooms seldom wait for pages, little enough that pages held in quarantine are missed.
        let each = u64::from(options.concurrent.max(1)).div_ceil(decodes.len() as u64) + 4;
        let pages = u32::try_from(each.saturating_mul(MAX_TOKENS / 4)).unwrap_or(u32::MAX).max(64);
        let write_delay_us = pick(rng, &[(1, 5000), (1, 300), (500, 4000), (50, 1500)]);
        let delays = Delays {
            control: pick(rng, &[(5, 60), (5, 800), (300, 3000)]),
            copy: pick(rng, &[(1, 20), (20, 400)]),
            turn: (1, 15),
        };
        let net = SimConfig {
            write_delay_us,
            notice_delay_us: (1, 600),
            fence_delay_us: (10, 5000),
            death_delay_us: (10, 8000),
            reorder: rng.coin(),
            observe_death: rng.between(0, 3) > 0,
            fence: options.fence,
        };
        Self {
            prefill: (prefill, prefills),
            decode: (decode, decodes),
            pages,
            delays,
            net,
            config: config(options),
            staging: super::packing::draw(options),
        }
    }
}

impl<'w> World<'w> {
    /// The net of a seed.
    pub(super) fn new(options: SimOptions, log: Log<'w>) -> Result<Self, (LayoutError, Log<'w>)> {
        let mut rng = SplitMix64::new(options.seed ^ 0x6B76_7866_6572_7331);
        let plan = Plan::draw(&options, &mut rng);
        Self::of(options, &plan, rng, log)
    }

    /// The net of a plan.
    pub(super) fn of(
        options: SimOptions,
        plan: &Plan,
        mut rng: SplitMix64,
        mut log: Log<'w>,
    ) -> Result<Self, (LayoutError, Log<'w>)> {
        let net = SimNet::new(rng.next_u64(), plan.net);
        let config = plan.config.clone();
        let mut agents = Vec::new();
        let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
        for (is_decode, (groups, sizes)) in [(false, &plan.prefill), (true, &plan.decode)] {
            for (e, &(tp_size, pp_size)) in sizes.iter().enumerate() {
                let role = if is_decode { "decode" } else { "prefill" };
                let name = format!("{role}-{e}");
                log.line(0, format_args!("engine {name} tp={tp_size} pp={pp_size} {:?}", groups[0]));
                let mut ranks = Vec::new();
                for rank in 0..tp_size * pp_size {
                    let shard = Shard { tp_rank: rank % tp_size, tp_size, pp_rank: rank / tp_size, pp_size };
                    let side = Side { groups: groups.clone(), shard };
                    let counts = vec![plan.pages; groups.len()];
                    let geo = match Geometry::new(&side, &counts) {
                        Ok(geo) => geo,
                        Err(e) => return Err((e, log)),
                    };
                    let mut lens = geo.region_lens();
                    lens.extend(super::packing::region_lens(plan.staging));
                    let node = net.add_node(&lens);
                    let incarnation = Incarnation(rng.next_u64());
                    let fabric = net.fabric(node);
                    let made = Agent::new(
                        format!("{name}.{rank}"),
                        (side, geo),
                        is_decode,
                        e,
                        &config,
                        incarnation,
                        fabric,
                    );
                    match made {
                        Ok(agent) => agents.push(agent),
                        Err(e) => return Err((e, log)),
                    }
                    ranks.push(agents.len() - 1);
                }
                let engine = Engine { name, agents: ranks };
                if is_decode { decodes.push(engine) } else { prefills.push(engine) }
            }
        }
        log.line(0, format_args!("{:?} {:?} {} pages", plan.delays, plan.net, plan.pages));
        let staging = plan.staging;
        if let Some((bytes, slots)) = staging {
            log.line(0, format_args!("staging rings of {slots} slots of {bytes} bytes"));
        }
        let near = plan.net.observe_death;
        let delays = plan.delays;
        Ok(Self::assemble(Parts {
            options,
            config,
            rng,
            net,
            delays,
            near,
            staging,
            agents,
            prefills,
            decodes,
            log,
        }))
    }
}
