"""Graph networks: torch_geometric, and message passing written by hand."""

import torch
from cases import case, randn
from torch import nn

GRAPHS, MORE_GRAPHS = [(5, 12), (8, 20)], [(1, 4), (11, 30)]


def edges(nodes, count):
    """Returns random edges."""
    return torch.randint(0, nodes, (2, count))


def _layer(name, *widths, **options):
    import torch_geometric.nn

    model = getattr(torch_geometric.nn, name)(*widths, **options)
    return model, lambda nodes, count: model(randn(nodes, 6), edges(nodes, count))


@case(GRAPHS, MORE_GRAPHS)
def gcn():
    return _layer("GCN", 6, 8, num_layers=2, out_channels=3)


@case(GRAPHS, MORE_GRAPHS)
def gat():
    return _layer("GAT", 6, 8, num_layers=2, out_channels=4, heads=2)


@case(GRAPHS, MORE_GRAPHS)
def graph_sage():
    return _layer("GraphSAGE", 6, 8, num_layers=2, out_channels=3)


@case(GRAPHS, MORE_GRAPHS)
def gin():
    return _layer("GIN", 6, 8, num_layers=2, out_channels=3)


@case(GRAPHS, MORE_GRAPHS)
def transformer_convolution():
    return _layer("TransformerConv", 6, 4, heads=2)


@case(GRAPHS, MORE_GRAPHS)
def residual_gates():
    return _layer("ResGatedGraphConv", 6, 8)


@case(GRAPHS, MORE_GRAPHS)
def several_aggregations():
    import torch_geometric.nn

    model = torch_geometric.nn.PNAConv(
        6, 8, aggregators=["mean", "max", "std"], scalers=["identity"], deg=torch.tensor([0, 3, 5, 2])
    )
    return model, lambda nodes, count: model(randn(nodes, 6), edges(nodes, count))


@case(GRAPHS, MORE_GRAPHS)
def edge_convolution():
    import torch_geometric.nn

    model = torch_geometric.nn.EdgeConv(nn.Sequential(nn.Linear(12, 8), nn.ReLU()), aggr="max")
    return model, lambda nodes, count: model(randn(nodes, 6), edges(nodes, count))


@case(GRAPHS, MORE_GRAPHS)
def features_of_edges():
    import torch_geometric.nn

    model = torch_geometric.nn.GINEConv(nn.Linear(6, 8), edge_dim=4)
    return model, lambda nodes, count: model(randn(nodes, 6), edges(nodes, count), randn(count, 4))


@case([(5, 12, 2), (8, 20, 3)], [(4, 4, 1), (11, 30, 4)])
def classified_graphs():
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = GCNConv(6, 8), nn.Linear(8, 3)

        def forward(self, x, edge_index, batch):
            return self.head(global_mean_pool(self.layer(x, edge_index).relu(), batch))

    model = Classifier()

    def use(nodes, count, graphs):
        model(randn(nodes, 6), edges(nodes, count), torch.arange(nodes) * graphs // nodes)

    return model, use


@case([(5, 12, 2), (8, 20, 3)], [(4, 4, 1), (11, 30, 4)])
def pooling_of_known_size():
    from torch_geometric.nn import GCNConv, global_add_pool, global_max_pool

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GCNConv(6, 8)

        def forward(self, x, edge_index, batch, ids):
            x, graphs = self.layer(x, edge_index), ids.shape[0]
            return global_add_pool(x, batch, graphs) + global_max_pool(x, batch, graphs)

    model = Pooled()

    def use(nodes, count, graphs):
        model(randn(nodes, 6), edges(nodes, count), torch.arange(nodes) * graphs // nodes, torch.arange(graphs))

    return model, use


@case(GRAPHS, MORE_GRAPHS)
def data_object():
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = GCNConv(6, 8)

        def forward(self, data):
            return self.layer(data.x, data.edge_index).relu()

    model = Net()
    return model, lambda nodes, count: model(Data(x=randn(nodes, 6), edge_index=edges(nodes, count)))


@case([(4, 5), (6, 7)], [(3, 4), (8, 9)])
def several_kinds_of_nodes():
    from torch_geometric.nn import HeteroConv, SAGEConv

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            ways = {("a", "to", "b"): SAGEConv((4, 4), 8), ("b", "back", "a"): SAGEConv((4, 4), 8)}
            self.layer = HeteroConv(ways)

        def forward(self, nodes, links):
            return self.layer(nodes, {("a", "to", "b"): links[0], ("b", "back", "a"): links[1]})

    model = Net()

    def use(a, b):
        links = [torch.stack([torch.arange(12) % x, torch.arange(12) % y]) for x, y in ((a, b), (b, a))]
        model({"a": randn(a, 4), "b": randn(b, 4)}, links)

    return model, use


@case([(5, 12), (8, 20)], [(4, 6), (11, 30)])
def atoms():
    from torch_geometric.nn import SchNet

    def near(position, _):
        row, column = edge_index = (torch.cdist(position, position) < 2.0).nonzero().T
        return edge_index, (position[row] - position[column]).norm(dim=-1)

    model = SchNet(hidden_channels=8, num_filters=8, num_interactions=1, num_gaussians=8, interaction_graph=near)
    return model, lambda nodes, _: model(torch.randint(1, 9, (nodes,)), randn(nodes, 3), torch.zeros(nodes).long())


@case(GRAPHS, MORE_GRAPHS)
def messages_by_hand():
    class Messages(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.update = nn.Linear(12, 8), nn.GRUCell(8, 6)

        def forward(self, x, source, target):
            for _ in range(2):
                sent = self.message(torch.cat([x[source], x[target]], -1)).relu()
                x = self.update(torch.zeros(x.shape[0], 8).index_add(0, target, sent), x)
            return x

    model = Messages()
    return model, lambda nodes, count: model(randn(nodes, 6), *edges(nodes, count))


@case(GRAPHS, MORE_GRAPHS)
def softmax_over_neighbours():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.score = nn.Linear(6, 8), nn.Linear(16, 1)

        def forward(self, x, edge_index):
            source, target = edge_index
            x = self.layer(x)
            scores = self.score(torch.cat([x[source], x[target]], -1)).squeeze(-1)
            top = torch.full((x.shape[0],), -torch.inf).scatter_reduce(0, target, scores, "amax")
            weights = (scores - top[target]).exp()
            total = torch.zeros(x.shape[0]).scatter_add(0, target, weights)
            return torch.zeros_like(x).index_add(0, target, x[source] * (weights / total[target]).unsqueeze(-1))

    model = Attention()
    return model, lambda nodes, count: model(randn(nodes, 6), edges(nodes, count))


@case([(2, 5), (3, 8)], [(1, 6), (4, 11)])
def dense_adjacency():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x, adjacency):
            adjacency = adjacency + torch.eye(adjacency.shape[-1])
            scale = adjacency.sum(-1).rsqrt()
            return (scale.unsqueeze(-1) * adjacency * scale.unsqueeze(-2)) @ self.layer(x)

    model = Dense()
    return model, lambda batch, nodes: model(randn(batch, nodes, 6), torch.randint(0, 2, (batch, nodes, nodes)).float())


@case([(5, 12), (8, 20)], [(4, 6), (11, 30)])
def distances_that_stay_under_rotation():
    class Equivariant(nn.Module):
        def __init__(self):
            super().__init__()
            self.edge, self.position, self.node = nn.Linear(13, 8), nn.Linear(8, 1), nn.Linear(14, 6)

        def forward(self, h, x, edge_index):
            row, column = edge_index
            delta = x[row] - x[column]
            sent = self.edge(torch.cat([h[row], h[column], delta.square().sum(-1, keepdim=True)], -1)).relu()
            count = torch.zeros(len(h), 1).index_add(0, row, torch.ones(len(row), 1)).clamp(min=1)
            moved = torch.zeros_like(x).index_add(0, row, delta * self.position(sent)) / count
            total = torch.zeros(len(h), 8).index_add(0, row, sent)
            return self.node(torch.cat([h, total], -1)), x + moved

    model = Equivariant()
    return model, lambda nodes, count: model(randn(nodes, 6), randn(nodes, 3), edges(nodes, count))
