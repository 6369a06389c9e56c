"""Two sites learn digits in NVFlare's simulator, with CRAFT as the server step: python job.py."""

from model import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from craft_adapters.nvflare import CraftAggregator

if __name__ == "__main__":
    recipe = FedAvgRecipe(
        name="craft-digits",
        model=Net(),
        min_clients=2,
        num_rounds=2,
        train_script="client.py",
        aggregator=CraftAggregator("craft", {"server_lr": 0.1}),
    )
    run = recipe.execute(SimEnv(num_clients=2))
    print("results in", run.get_result())
